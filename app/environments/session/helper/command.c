/* One command: start it, carry its streams, end it in time, tell how it went. */
#include "helper.h"

#include <poll.h>
#include <sys/wait.h>

enum { GRACE_US = 100000 }; /* how long a background process that holds the output may delay the answer */

struct input { /* stdin that the client sends */
    int fd;
    bool following, ended;
    uint32_t left; /* of the frame under way */
    unsigned char *piece;
    size_t size;
};

struct command {
    struct outcome outcome;
    pid_t pid;
    int out, err;
    struct input input;
    struct log logs[2]; /* of stdout and stderr */
    int64_t until_us; /* 0: no limit */
};

void outcome_send(struct outcome *o) {
    unsigned char fixed[72] = {0};
    struct iovec parts[8] = {{0}, {fixed, sizeof fixed}};
    int status = o->ending.status, number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    uint32_t code = (uint32_t)(number ? 128 + number : WEXITSTATUS(status));
    uint32_t words[6] = {code, (uint32_t)number, o->flags, 0, (uint32_t)capture_kept(&o->out),
                         (uint32_t)capture_kept(&o->err)};
    const struct timeval *user = &o->ending.usage.ru_utime, *system = &o->ending.usage.ru_stime;
    uint64_t longs[6] = {o->out.total, o->err.total, (uint64_t)user->tv_sec * 1000000 + (uint64_t)user->tv_usec,
                         (uint64_t)system->tv_sec * 1000000 + (uint64_t)system->tv_usec,
                         (uint64_t)o->ending.usage.ru_maxrss, (uint64_t)(now_us() - o->begun_us)};
    memcpy(fixed, words, sizeof words);
    memcpy(fixed + sizeof words, longs, sizeof longs);
    int count = 2;
    count += capture_parts(&o->out, parts + count);
    count += capture_parts(&o->err, parts + count);
    wire_sendv(RESULT, parts, count);
}

static void close_one(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* Read until nothing is there; closes at the end of the stream. */
static void drain(struct capture *capture, int *fd, struct log *log) {
    while (*fd >= 0) {
        ssize_t n = capture_read(capture, *fd, log);
        if (n > 0 || (n < 0 && errno == EINTR)) continue;
        if (n < 0 && errno == EAGAIN) return;
        close_one(fd);
    }
}

/* As `drain`, but a piece at a time, so that a stream without end leaves us our deadline. */
static void read_some(struct capture *capture, int *fd, struct log *log) {
    ssize_t n = capture_read(capture, *fd, log);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) close_one(fd);
}

/* --- Standard input --------------------------------------------------------------------------------------------- */

static void input_next(struct input *in) {
    while (in->following && !in->size) {
        if (!in->left) {
            struct frame frame = wire_next();
            if (frame.kind == END) in->following = false;
            else if (frame.kind != DATA) lane_end();
            in->left = frame.size;
            if (frame.kind == END) break;
        }
        if (in->left) in->left -= (uint32_t)(in->size = wire_some(in->left, &in->piece));
        if (in->fd < 0) in->size = 0; /* nobody reads: drop it */
        if (!wire_pending()) break;
    }
    if (!in->following && !in->size) close_one(&in->fd);
}

static void input_write(struct input *in) {
    ssize_t n = write(in->fd, in->piece, in->size);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
        close_one(&in->fd);
        in->size = 0;
    }
    if (n > 0) {
        in->piece += n;
        in->size -= (size_t)n;
    }
    if (!in->size && (!in->following || wire_pending())) input_next(in);
}

/* What the client still sends for a command that has ended. */
static void input_drop(struct input *in) {
    close_one(&in->fd);
    in->size = 0;
    wire_skip(in->left);
    in->left = 0;
    while (in->following) {
        struct frame frame = wire_next();
        in->following = frame.kind != END;
        wire_skip(frame.size);
    }
}

/* A client that still sends does not listen: nothing is logged until its input is here. */
static struct log *log_of(struct command *c, int stream) { return c->input.following ? &no_log : c->logs + stream; }

/* --- The way of a command --------------------------------------------------------------------------------------- */

static void time_out(struct command *c) {
    c->outcome.flags |= TIMED_OUT;
    if (!tree_kill(NULL, c->pid, &c->outcome.ending)) c->outcome.flags |= KILL_INCOMPLETE;
    drain(&c->outcome.out, &c->out, log_of(c, 0));
    drain(&c->outcome.err, &c->err, log_of(c, 1));
}

static int wait_ms(int64_t until_us) {
    if (!until_us) return -1;
    int64_t left = until_us - now_us();
    return left <= 0 ? 0 : left > 1000000000 ? 1000000 : (int)(left / 1000) + 1;
}

/* Returns whether processes of the command are left. */
static bool carry(struct command *c) {
    bool left = true;
    int64_t grace = 0;
    for (;;) {
        if (c->input.following && !c->input.size && wire_pending()) input_next(&c->input);
        short conn = c->input.following && !c->input.size ? POLLIN | POLLRDHUP : POLLRDHUP;
        struct pollfd fds[6] = {{wire_in(), conn, 0}, {signals(), POLLIN, 0}, {c->out, POLLIN, 0}, {c->err, POLLIN, 0},
                                {c->input.size ? c->input.fd : -1, POLLOUT, 0}, {main_pulse(), 0, 0}};
        int ready = poll(fds, 6, wait_ms(grace ? grace : c->until_us));
        if (ready < 0 && errno != EINTR) lane_end();
        if (ready == 0 && grace && now_us() >= grace) return left;
        if (!grace && c->until_us && now_us() >= c->until_us) {
            time_out(c);
            return false;
        }
        if (ready <= 0) continue;
        if (fds[5].revents) lane_end();
        if (fds[0].revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) lane_end();
        if (fds[0].revents & POLLIN) input_next(&c->input);
        if (fds[4].revents) input_write(&c->input);
        if (fds[2].revents) read_some(&c->outcome.out, &c->out, log_of(c, 0));
        if (fds[3].revents) read_some(&c->outcome.err, &c->err, log_of(c, 1));
        if (fds[1].revents) {
            if (signals_take()) lane_end();
            left = tree_reap(c->pid, &c->outcome.ending);
            if (c->outcome.ending.ended && !grace) grace = now_us() + GRACE_US;
        }
        if (c->outcome.ending.ended) {
            if (!left) {
                drain(&c->outcome.out, &c->out, log_of(c, 0));
                drain(&c->outcome.err, &c->err, log_of(c, 1));
                return false;
            }
            if (c->out < 0 && c->err < 0) return true;
        }
    }
}

static int pipe_pair(int *ours, int *theirs, bool we_read) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return -1;
    *ours = high(ends[we_read ? 0 : 1]);
    *theirs = high(ends[we_read ? 1 : 0]);
    return fcntl(*ours, F_SETFL, O_NONBLOCK | (we_read ? 0 : O_WRONLY));
}

static void refuse(struct outcome *o, int code, const char *problem) {
    o->flags |= NOT_STARTED;
    o->ending.status = code << 8;
    capture_text(&o->err, problem);
}

/* Start with pipes; false: refused. */
static bool begin(struct command *c, struct spawn *spawn, bool input) {
    int *s = spawn->streams;
    s[0] = s[1] = s[2] = -1;
    bool fine = !pipe_pair(&c->out, s + 1, true) && !pipe_pair(&c->err, s + 2, true);
    if (fine && input) fine = !pipe_pair(&c->input.fd, s, false);
    else if (fine) fine = (s[0] = null_input()) >= 0;
    if (fine) c->pid = spawn_start(spawn);
    else snprintf(spawn->problem, sizeof spawn->problem, "cannot make pipes: %s\n", strerror(errno)), spawn->code = 126;
    for (int i = 0; i < 3; i++) close_one(s + i);
    if (!c->pid) refuse(&c->outcome, spawn->code, spawn->problem);
    my_seat->session = c->pid;
    return c->pid != 0;
}

static void end_of(struct command *c, bool left) {
    my_seat->session = 0;
    input_drop(&c->input); /* first: a client that still sends does not read, and a long result would wait for it */
    outcome_send(&c->outcome);
    capture_release(&c->outcome.out);
    capture_release(&c->outcome.err);
    if (left) {
        int out = c->out, err = c->err;
        c->out = c->err = -1;
        lane_hand_over(out, err);
    }
    close_one(&c->out);
    close_one(&c->err);
}

void run_request(uint32_t size) {
    static struct command kept; /* the buffers of its captures are used again */
    struct command *c = &kept;
    struct cursor at = {wire_payload(size), NULL, false};
    at.end = at.at + size;
    uint32_t flags = take_u32(&at), timeout_ms = take_u32(&at), head = take_u32(&at), tail = take_u32(&at);
    uint64_t log_limit = take_u64(&at);
    struct text cwd = take_text(&at), user = take_text(&at), script = take_text(&at), input = take_text(&at);
    char **argv = take_list(&at), **env = take_list(&at);
    if (at.broken) lane_end();
    c->pid = 0;
    c->out = c->err = -1;
    c->outcome.flags = 0;
    c->outcome.ending = (struct ending){0};
    c->outcome.begun_us = now_us();
    c->until_us = timeout_ms ? c->outcome.begun_us + timeout_ms * 1000LL : 0;
    c->input = (struct input){.fd = -1, .following = flags & STDIN_FOLLOWS};
    c->input.piece = (unsigned char *)input.bytes;
    c->input.size = input.size;
    capture_begin(&c->outcome.out, head, tail);
    capture_begin(&c->outcome.err, head, tail);
    c->logs[0] = (struct log){.kind = OUT, .left = log_limit};
    c->logs[1] = (struct log){.kind = ERR, .left = log_limit};
    struct spawn spawn = {.argv = argv, .env = env, .cwd = cwd.bytes, .user = user.bytes, .clear_env = flags & CLEAR_ENV};
    int script_fd = flags & AS_SCRIPT ? script_of(script) : -1;
    if (script_fd >= 0) {
        spawn.extras = 1;
        spawn.extra[0].from = script_fd;
        spawn.extra[0].to = 250; /* the last of argv is /proc/self/fd/250 */
    }
    bool left = false;
    if (begin(c, &spawn, input.size || c->input.following)) {
        if (!input.size && !c->input.following) close_one(&c->input.fd);
        left = carry(c);
    } else {
        tree_reap(0, NULL);
    }
    close_one(&script_fd);
    free(argv);
    free(env);
    end_of(c, left);
}
