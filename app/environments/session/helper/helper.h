/* The session helper: what its files share. README.md beside this folder draws the processes; protocol.py has the wire.
 *
 * One process per lane, one thread per process: state of the lane is global. */
#ifndef HELPER_H
#define HELPER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { VERSION = 2, HEADER = 8, MAX_REQUEST = 32 << 20, CHUNK = 256 << 10, MAX_LANES = 512 };

enum kind {
    RUN = 1, DATA, END, SHELL_OPEN, SHELL_RUN, SHELL_CLOSE, STREAM_OPEN, RESIZE, SIGNAL, STOP,
    PUT, GET, PUT_TREE, GET_TREE, STATS, KILL_ALL, PING, LIST,
    HELLO = 64, RESULT, OK, FAILED, OUT, ERR, EXIT,
};

enum run_flag { STDIN_FOLLOWS = 1, CLEAR_ENV = 2, AS_SCRIPT = 4, TERMINAL = 8 };
enum result_flag { TIMED_OUT = 1, NOT_STARTED = 2, KILL_INCOMPLETE = 4 };
enum failure { OF_SYSTEM = 0, OF_ARCHIVE = 1, OF_REQUEST = 2 };

/* --- main.c: the process that outlives the lanes ---------------------------------------------------------------- */

struct seat {
    volatile pid_t lane;    /* 0: free */
    volatile pid_t session; /* of the command under way; 0: none */
};
extern struct seat *seats; /* MAX_LANES, shared by all processes of the helper */
extern struct seat *my_seat;
extern pid_t main_pid;
void keep_reading(int fd); /* have the main process read and discard what comes, until its end; closes fd here */

/* --- wire.c: frames --------------------------------------------------------------------------------------------- */

struct frame {
    enum kind kind;
    uint32_t size;
};
struct text { /* a field of a request: NUL-terminated in place */
    char *bytes;
    uint32_t size;
};
struct cursor {
    unsigned char *at, *end;
    bool broken;
};

void wire_open(int in, int out);
int wire_in(void);
int wire_out(void);
void wire_blocking(bool blocking);
bool wire_pending(void);                             /* something was received and not yet taken */
struct frame wire_next(void);                        /* blocks; ends the lane when the connection is gone */
unsigned char *wire_payload(uint32_t size);          /* the whole payload, valid until the next call */
size_t wire_some(uint32_t left, unsigned char **at); /* a piece of a payload; blocks */
void wire_skip(uint32_t size);
void wire_send(enum kind kind, const void *bytes, size_t size);
void wire_sendv(enum kind kind, struct iovec *parts, int count); /* parts[0] is left for the header */
void wire_fail(enum failure what, int number, const char *format, ...) __attribute__((format(printf, 3, 4)));
_Noreturn void lane_end(void); /* kill what runs in this lane and leave */

uint32_t take_u32(struct cursor *c);
uint64_t take_u64(struct cursor *c);
struct text take_text(struct cursor *c);
char **take_list(struct cursor *c); /* malloc'd, NULL-terminated; the strings stay in the payload */

/* --- tree.c: processes ------------------------------------------------------------------------------------------ */

struct pids {
    pid_t *pid;
    size_t count, room;
};
struct ending {
    bool ended;
    int status;
    struct rusage usage;
};

bool tree_reap(pid_t main, struct ending *ending);                            /* true: children are left */
void tree_below_me(struct pids *found);                                       /* every descendant of this process */
bool tree_kill(const struct pids *spared, pid_t main, struct ending *ending); /* exact; false: some would not die */
void tree_kill_session(pid_t session);
uint32_t tree_kill_all(void);
uint32_t tree_count(void);
bool pids_has(const struct pids *set, pid_t pid);

/* --- spawn.c: starting a program -------------------------------------------------------------------------------- */

struct spawn {
    char **argv, **env; /* env: what is added to the helper's own */
    const char *cwd, *user;
    bool clear_env, terminal;
    int streams[3];                    /* stdin, stdout, stderr */
    struct { int from, to; } extra[4]; /* further descriptors to hand over */
    int extras;
    char problem[512]; /* why it did not start */
    int code;          /* 126 or 127 then */
};

void spawn_prepare(void);          /* once per lane */
pid_t spawn_start(struct spawn *); /* 0: see `problem` */
int null_input(void);
int script_of(struct text script); /* a descriptor >= 20 with the text, readable by path; -1 */
int high(int fd);                  /* the same, at 20 or above, closed on exec */

/* --- capture.c: bounded output ---------------------------------------------------------------------------------- */

struct capture {
    unsigned char *bytes;
    size_t room, at;
    uint64_t total;
    uint32_t head, tail;
};
void capture_begin(struct capture *, uint32_t head, uint32_t tail);
struct log;
ssize_t capture_read(struct capture *, int fd, struct log *); /* like read(2); of a long stream the log gets it all */
void capture_text(struct capture *, const char *text);
void capture_release(struct capture *); /* give back what a long output took */
size_t capture_kept(const struct capture *);
int capture_parts(const struct capture *, struct iovec *parts); /* at most 3 */

struct log { /* all of a stream that is too long to be kept, sent while it comes: the client must be listening */
    enum kind kind; /* OUT or ERR */
    bool begun;
    uint64_t left; /* how much more of it is wanted */
};
extern struct log no_log;

/* --- the requests ----------------------------------------------------------------------------------------------- */

void body_begin(void);                              /* DATA frames up to an END follow a request */
size_t body_some(unsigned char **piece, size_t most); /* 0: the end */
void body_drop(void);
int write_all(int fd, const unsigned char *bytes, size_t size);
int make_parents(char *path);

void run_request(uint32_t size);
void shell_open(uint32_t size);
void stream_open(uint32_t size);
void file_put(uint32_t size);
void file_get(uint32_t size);
void tar_put(uint32_t size);
void tar_get(uint32_t size);
void list_get(uint32_t size);
void stats_request(void);

struct outcome {
    uint32_t flags;
    struct ending ending;
    struct capture out, err;
    int64_t begun_us;
};
void outcome_send(struct outcome *);
void lane_hand_over(int out, int err); /* survivors go to the main process, a fork of us goes on; -1: nothing to read */
int64_t now_us(void);
int signals(void);  /* the lane's signalfd: SIGCHLD and SIGTERM */
bool signals_take(void);
int main_pulse(void); /* polled: says when the main process has gone */

#endif
