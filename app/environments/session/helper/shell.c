/* A shell that remembers. It reads a line to go on, sources the command from a descriptor, and tells its status, its
 * folder and its exports over another: nothing of this passes through the command's own streams. */
#include "helper.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { COMMAND_FD = 250, GO_FD = 251, TELL_FD = 252, LONGEST_TELL = 4 << 20, START_MS = 10000 };

/* Opened by path, since dash knows no descriptor above 9 in a redirection, and commands use those themselves. */
static const char loop[] =
    "__mf_tell() { { printf '%s\\0%s\\0' \"$1\" \"$PWD\"; export -p; printf '\\0'; } >/proc/self/fd/252; }\n"
    "__mf_is() { return \"$1\"; }\n"
    "trap '__mf_tell x' EXIT\n"
    "__mf_last=0\n"
    "__mf_tell r\n"
    "while IFS= read -r __mf_go </proc/self/fd/251; do\n"
    "  __mf_is \"$__mf_last\"\n"
    "  . /proc/self/fd/250\n"
    "  __mf_last=$?\n"
    "  __mf_tell \"$__mf_last\"\n"
    "done\n";

static struct {
    char *program, *user, *cwd, *exports;
    char **env;
    pid_t pid; /* 0: none is running */
    int command, go, tell, out, err, out_theirs, err_theirs;
    struct ending ending;
    struct log logs[2]; /* of the command under way */
    char *told; /* what came over `tell`, not yet complete */
    size_t told_size, told_room;
    bool ready;  /* it waits for a command */
    int status;  /* of the last one */
    char problem[512];
} shell;

static void close_one(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static void keep(char **place, const char *text) {
    char *copy = strdup(text);
    if (!copy) lane_end();
    free(*place);
    *place = copy;
}

static void open_pipe(int *ours, int *theirs, bool we_read) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) lane_end();
    *ours = high(ends[!we_read]);
    *theirs = high(ends[we_read]);
    fchmod(*ours, 0666); /* opened by path, maybe by another user */
    if (we_read) fcntl(*ours, F_SETFL, O_NONBLOCK);
}

/* --- What the shell tells --------------------------------------------------------------------------------------- */

/* One report: status, folder, exports, each ended by a zero. */
static void take_report(const char *status, const char *folder, const char *exports) {
    if (*folder == '/') keep(&shell.cwd, folder);
    keep(&shell.exports, exports);
    if (*status == 'x') return; /* its end is near */
    shell.ready = true;
    if (*status != 'r') shell.status = atoi(status);
}

static void hear(void) {
    for (;;) {
        if (shell.told_room - shell.told_size < 4096) {
            size_t room = shell.told_room ? 2 * shell.told_room : 1 << 16;
            if (room > LONGEST_TELL) shell.told_size = 0; /* no shell of ours: forget it */
            else if (!(shell.told = realloc(shell.told, shell.told_room = room))) lane_end();
        }
        ssize_t n = read(shell.tell, shell.told + shell.told_size, shell.told_room - shell.told_size);
        if (n <= 0) return;
        shell.told_size += (size_t)n;
        for (;;) {
            char *end = shell.told + shell.told_size, *folder, *exports, *after;
            if (!(folder = memchr(shell.told, 0, shell.told_size))) break;
            if (!(exports = memchr(folder + 1, 0, (size_t)(end - folder - 1)))) break;
            if (!(after = memchr(exports + 1, 0, (size_t)(end - exports - 1)))) break;
            take_report(shell.told, folder + 1, exports + 1);
            shell.told_size = (size_t)(end - after - 1);
            memmove(shell.told, after + 1, shell.told_size);
        }
    }
}

/* --- Starting it ------------------------------------------------------------------------------------------------ */

static bool launch(void) {
    int go_theirs, tell_theirs;
    close_one(&shell.go);
    close_one(&shell.tell);
    open_pipe(&shell.go, &go_theirs, false);
    open_pipe(&shell.tell, &tell_theirs, true);
    shell.told_size = 0;
    shell.ready = false;
    shell.ending = (struct ending){0};
    char *argv[] = {shell.program, "-c", (char *)loop, shell.program, NULL};
    struct stat about;
    struct spawn s = {.argv = argv, .env = shell.env, .user = shell.user, .cwd = shell.cwd, .extras = 3};
    if (s.cwd && stat(s.cwd, &about)) s.cwd = "/"; /* it was removed meanwhile */
    s.streams[0] = null_input();
    s.streams[1] = shell.out_theirs;
    s.streams[2] = shell.err_theirs;
    s.extra[0].from = shell.command, s.extra[0].to = COMMAND_FD;
    s.extra[1].from = go_theirs, s.extra[1].to = GO_FD;
    s.extra[2].from = tell_theirs, s.extra[2].to = TELL_FD;
    shell.pid = spawn_start(&s);
    close(s.streams[0]);
    close(go_theirs);
    close(tell_theirs);
    if (!shell.pid) memcpy(shell.problem, s.problem, sizeof shell.problem);
    my_seat->session = shell.pid;
    return shell.pid != 0;
}

static void give(const char *script, size_t size) {
    shell.ready = false;
    if (ftruncate(shell.command, 0)) lane_end();
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(shell.command, script + done, size - done, (off_t)done);
        if (n <= 0) lane_end();
        done += (size_t)n;
    }
    if (write(shell.go, "\n", 1) != 1) return; /* it has died: the caller sees that */
}

/* --- Waiting for it --------------------------------------------------------------------------------------------- */

static void drain(struct capture *capture, int fd, struct log *log) {
    for (int pieces = 0; pieces < 4096; pieces++) /* somebody in the background may write without end */
        if (capture_read(capture, fd, log) <= 0) return;
}

/* Until it waits for the next command, has ended, or the time is up (false). */
static bool await(int64_t until_us, struct capture *out, struct capture *err) {
    while (!shell.ready && !shell.ending.ended) {
        int64_t left_ms = until_us ? (until_us - now_us()) / 1000 + 1 : 1000000;
        if (left_ms <= 0) return false;
        struct pollfd fds[6] = {{wire_in(), POLLRDHUP, 0}, {signals(), POLLIN, 0}, {shell.out, POLLIN, 0},
                                {shell.err, POLLIN, 0}, {shell.tell, POLLIN, 0}, {main_pulse(), 0, 0}};
        int ready = poll(fds, 6, left_ms > 1000000 ? 1000000 : (int)left_ms);
        if (ready < 0 && errno != EINTR) lane_end();
        if (ready <= 0) continue;
        if (fds[0].revents || fds[5].revents) lane_end();
        if (fds[2].revents) capture_read(out, shell.out, &shell.logs[0]);
        if (fds[3].revents) capture_read(err, shell.err, &shell.logs[1]);
        if (fds[4].revents & POLLIN) hear();
        else if (fds[4].revents) close_one(&shell.tell); /* it closed what it should not: only the time is left */
        if (fds[1].revents) {
            if (signals_take()) lane_end();
            tree_reap(shell.pid, &shell.ending);
        }
    }
    return true;
}

/* Have a shell that waits; a new one gets the exports of the last. */
static bool have_shell(struct capture *out, struct capture *err) {
    if (shell.pid) return true;
    if (!launch()) return false;
    char *exports = shell.exports ? strdup(shell.exports) : NULL;
    int64_t until = now_us() + START_MS * 1000LL;
    struct capture nobody = {0}, *said = exports ? &nobody : err; /* a first start that fails says why */
    bool fine = await(until, out, said) && shell.ready;
    if (fine && exports && *exports) {
        char *cwd = strdup(shell.cwd ? shell.cwd : "/");
        give(exports, strlen(exports));
        fine = await(until, &nobody, &nobody) && shell.ready;
        drain(&nobody, shell.err, &no_log); /* complaints about read-only variables are not the next command's */
        if (cwd) keep(&shell.cwd, cwd);
        free(cwd);
    }
    free(exports);
    free(nobody.bytes);
    if (fine) return true;
    tree_kill(NULL, shell.pid, &shell.ending);
    shell.pid = 0;
    snprintf(shell.problem, sizeof shell.problem, "%.400s does not work as a shell\n", shell.program);
    return false;
}

/* --- Commands --------------------------------------------------------------------------------------------------- */

/* Who runs beside the shell from earlier commands: to be spared. */
static void bystanders(struct pids *spared) {
    tree_below_me(spared);
    for (size_t i = 0; i < spared->count; i++)
        if (spared->pid[i] == shell.pid) spared->pid[i] = spared->pid[--spared->count];
}

static bool has_bystanders(void) {
    char path[64], text[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)shell.pid, (int)shell.pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 1 : read(fd, text, sizeof text);
    if (fd >= 0) close(fd);
    fd = n ? -1 : open("/proc/thread-self/children", O_RDONLY | O_CLOEXEC);
    n = fd < 0 ? 64 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n <= 0 || n > 63) return true;
    text[n] = 0;
    char *second = strchr(text, ' ');
    return second && second[1];
}

static void command(struct cursor *at, struct outcome *o) {
    static struct pids spared;
    uint32_t timeout_ms = take_u32(at);
    uint64_t log_limit = take_u64(at);
    struct text script = take_text(at);
    if (at->broken) lane_end();
    o->begun_us = now_us();
    o->flags = 0;
    o->ending = (struct ending){0};
    if (!have_shell(&o->out, &o->err)) {
        o->flags = NOT_STARTED;
        o->ending.status = 127 << 8;
        capture_text(&o->err, shell.problem);
        return;
    }
    spared.count = 0;
    if (has_bystanders()) bystanders(&spared);
    shell.logs[0] = (struct log){.kind = OUT, .left = log_limit};
    shell.logs[1] = (struct log){.kind = ERR, .left = log_limit};
    give(script.bytes, script.size);
    bool in_time = await(timeout_ms ? o->begun_us + timeout_ms * 1000LL : 0, &o->out, &o->err);
    if (!in_time) {
        o->flags = TIMED_OUT;
        if (!tree_kill(&spared, shell.pid, &shell.ending)) o->flags |= KILL_INCOMPLETE;
    }
    hear();
    drain(&o->out, shell.out, &shell.logs[0]);
    drain(&o->err, shell.err, &shell.logs[1]);
    shell.logs[0] = shell.logs[1] = no_log;
    o->ending = shell.ending;
    if (shell.ending.ended) {
        int status = shell.ending.status;
        shell.pid = 0;
        my_seat->session = 0;
        shell.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    } else {
        o->ending.status = (shell.status & 255) << 8;
    }
}

/* End the shell, not what it left running. */
static void leave(void) {
    if (shell.pid) {
        kill(shell.pid, SIGKILL);
        while (waitpid(shell.pid, NULL, 0) < 0 && errno == EINTR) {}
    }
    shell.pid = 0;
    my_seat->session = 0;
    close_one(&shell.out_theirs);
    close_one(&shell.err_theirs);
    close_one(&shell.command);
    close_one(&shell.go);
    close_one(&shell.tell);
    free(shell.exports);
    shell.exports = NULL;
    int out = shell.out, err = shell.err;
    shell.out = shell.err = -1;
    wire_send(OK, NULL, 0);
    if (tree_reap(0, NULL)) {
        lane_hand_over(out, err);
        return;
    }
    close(out);
    close(err);
}

/* Idle: what background processes write is kept for the next command, as on a terminal. */
static void idle(struct outcome *o) {
    while (!wire_pending()) {
        struct pollfd fds[6] = {{wire_in(), POLLIN, 0}, {signals(), POLLIN, 0}, {shell.out, POLLIN, 0},
                                {shell.err, POLLIN, 0}, {shell.pid ? shell.tell : -1, POLLIN, 0},
                                {main_pulse(), 0, 0}};
        if (poll(fds, 6, -1) < 0) continue;
        if (fds[5].revents) lane_end();
        if (fds[2].revents) capture_read(&o->out, shell.out, &no_log);
        if (fds[3].revents) capture_read(&o->err, shell.err, &no_log);
        if (fds[1].revents) {
            if (signals_take()) lane_end();
            tree_reap(shell.pid, &shell.ending);
            if (shell.ending.ended) shell.pid = 0; /* somebody killed it: the next command finds a new one */
        } else if (fds[4].revents) {
            hear();
        }
        if (fds[0].revents) return;
    }
}

static void converse(struct outcome *o, uint32_t head, uint32_t tail) {
    for (;;) {
        capture_begin(&o->out, head, tail);
        capture_begin(&o->err, head, tail);
        idle(o);
        struct frame frame = wire_next();
        if (frame.kind == SHELL_CLOSE) {
            leave();
            return;
        }
        if (frame.kind != SHELL_RUN) lane_end();
        struct cursor at = {wire_payload(frame.size), NULL, false};
        at.end = at.at + frame.size;
        command(&at, o);
        outcome_send(o);
        capture_release(&o->out);
        capture_release(&o->err);
    }
}

static char **copied(char **list) {
    size_t count = 0;
    while (list[count]) count++;
    char **copy = calloc(count + 1, sizeof *copy);
    if (!copy) lane_end();
    for (size_t i = 0; i < count; i++) keep(copy + i, list[i]);
    return copy;
}

void shell_open(uint32_t size) {
    static struct outcome outcome;
    struct cursor at = {wire_payload(size), NULL, false};
    at.end = at.at + size;
    uint32_t head = take_u32(&at), tail = take_u32(&at);
    struct text program = take_text(&at), cwd = take_text(&at), user = take_text(&at);
    char **env = take_list(&at);
    if (at.broken) lane_end();
    keep(&shell.program, program.bytes);
    keep(&shell.cwd, *cwd.bytes ? cwd.bytes : "/");
    keep(&shell.user, user.bytes);
    shell.env = copied(env); /* a lane opens few shells: the last one's list is not missed */
    free(env);
    struct stat about;
    if (stat(shell.cwd, &about) || !S_ISDIR(about.st_mode)) {
        wire_fail(OF_REQUEST, ENOENT, "cannot enter the folder %.400s", shell.cwd);
        return;
    }
    shell.command = high(memfd_create("command", MFD_CLOEXEC));
    if (shell.command < 0) lane_end();
    shell.go = shell.tell = -1;
    open_pipe(&shell.out, &shell.out_theirs, true);
    open_pipe(&shell.err, &shell.err_theirs, true);
    fchmod(shell.out_theirs, 0666);
    fchmod(shell.err_theirs, 0666);
    capture_begin(&outcome.out, head, tail);
    capture_begin(&outcome.err, head, tail);
    if (!have_shell(&outcome.out, &outcome.err)) {
        struct iovec said[3];
        int parts = capture_parts(&outcome.err, said);
        wire_fail(OF_REQUEST, ENOEXEC, "%.400s %.*s", shell.problem, parts ? (int)(said[0].iov_len % 400) : 0,
                  parts ? (char *)said[0].iov_base : "");
        close_one(&shell.command), close_one(&shell.go), close_one(&shell.tell);
        close_one(&shell.out), close_one(&shell.err), close_one(&shell.out_theirs), close_one(&shell.err_theirs);
        return;
    }
    wire_send(OK, NULL, 0);
    converse(&outcome, head, tail);
}
