/* A program that is talked to while it runs. Nothing blocks on the client: it may write without reading. */
#include "helper.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>

enum { PIECE = 32 << 10, ROOM = 4 << 20 };

struct queue {
    unsigned char *bytes;
    size_t at, end;
};
static struct {
    pid_t pid;
    bool terminal;
    int in, out, err; /* of the program, our ends; in == out for a terminal */
    struct queue to_program, to_client;
    bool input_ended;
    uint32_t left; /* of a DATA frame under way */
    struct ending ending;
} stream;

static size_t waiting(const struct queue *q) { return q->end - q->at; }

static void add(struct queue *q, const void *bytes, size_t size) {
    if (!q->bytes && !(q->bytes = malloc(ROOM))) lane_end();
    if (ROOM - q->end < size) {
        memmove(q->bytes, q->bytes + q->at, waiting(q));
        q->end -= q->at;
        q->at = 0;
    }
    memcpy(q->bytes + q->end, bytes, size);
    q->end += size;
}

/* Write what goes; false: nobody takes it any more. */
static bool flush(struct queue *q, int fd) {
    while (waiting(q)) {
        ssize_t n = write(fd, q->bytes + q->at, waiting(q));
        if (n < 0) return errno == EAGAIN || errno == EINTR;
        q->at += (size_t)n;
    }
    q->at = q->end = 0;
    return true;
}

static void frame_out(enum kind kind, const void *bytes, size_t size) {
    unsigned char header[HEADER] = {VERSION, (unsigned char)kind};
    for (int i = 0; i < 4; i++) header[4 + i] = (unsigned char)(size >> 8 * i);
    add(&stream.to_client, header, HEADER);
    add(&stream.to_client, bytes, size);
}

/* Pass on a piece; closes at the end. */
static bool pass(int *fd, enum kind kind) {
    static unsigned char bytes[PIECE];
    ssize_t n = read(*fd, bytes, sizeof bytes);
    if (n > 0) frame_out(kind, bytes, (size_t)n);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return n > 0;
    if (stream.terminal && fd == &stream.out) stream.in = -1;
    close(*fd);
    *fd = -1;
    return false;
}

/* --- What the client says --------------------------------------------------------------------------------------- */

static void resize(uint32_t rows, uint32_t columns) {
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    if (stream.terminal && stream.out >= 0) ioctl(stream.out, TIOCSWINSZ, &size);
}

static void take_request(void) {
    unsigned char *piece;
    if (stream.left) {
        size_t n = wire_some(stream.left < PIECE ? stream.left : PIECE, &piece);
        stream.left -= (uint32_t)n;
        if (stream.in >= 0 && !stream.input_ended) add(&stream.to_program, piece, n);
        return;
    }
    struct frame frame = wire_next();
    if (frame.kind == DATA) {
        stream.left = frame.size;
        return;
    }
    struct cursor at = {wire_payload(frame.size), NULL, false};
    at.end = at.at + frame.size;
    uint32_t first, second;
    switch (frame.kind) {
    case END: stream.input_ended = true; return;
    case RESIZE:
        first = take_u32(&at), second = take_u32(&at);
        resize(first, second);
        return;
    case SIGNAL:
        first = take_u32(&at);
        if (first > 0 && first < 65 && !stream.ending.ended) {
            pid_t front = stream.terminal && stream.out >= 0 ? tcgetpgrp(stream.out) : -1;
            kill(front > 1 ? -front : -stream.pid, (int)first);
        }
        return;
    case STOP: tree_kill(NULL, stream.pid, &stream.ending); return;
    default: lane_end();
    }
}

static void end_input(void) {
    if (stream.in < 0 || !stream.input_ended || waiting(&stream.to_program)) return;
    if (stream.terminal) {
        add(&stream.to_program, "\004", 1); /* a terminal has no end, only a character that says so */
    } else {
        close(stream.in);
        stream.in = -1;
    }
    stream.input_ended = false;
}

/* --- The way of a stream ---------------------------------------------------------------------------------------- */

/* Returns whether processes of the program are left. */
static bool carry(void) {
    bool left = true;
    for (;;) {
        bool can_read = waiting(&stream.to_client) < ROOM / 4, can_take = waiting(&stream.to_program) < ROOM / 2;
        while (can_take && wire_pending()) {
            take_request();
            can_take = waiting(&stream.to_program) < ROOM / 2;
        }
        end_input();
        struct pollfd fds[7] = {
            {wire_in(), can_take ? POLLIN | POLLRDHUP : POLLRDHUP, 0},
            {signals(), POLLIN, 0},
            {can_read ? stream.out : -1, POLLIN, 0},
            {can_read ? stream.err : -1, POLLIN, 0},
            {waiting(&stream.to_program) ? stream.in : -1, POLLOUT, 0},
            {waiting(&stream.to_client) ? wire_out() : -1, POLLOUT, 0},
            {main_pulse(), 0, 0},
        };
        if (poll(fds, 7, -1) < 0) continue;
        if (fds[6].revents) lane_end();
        if (fds[0].revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) lane_end();
        if (fds[0].revents & POLLIN) take_request();
        if (fds[2].revents && stream.out >= 0) pass(&stream.out, OUT);
        if (fds[3].revents && stream.err >= 0) pass(&stream.err, ERR);
        if (fds[4].revents && stream.in >= 0 && !flush(&stream.to_program, stream.in))
            stream.to_program.at = stream.to_program.end = 0;
        if (fds[5].revents && !flush(&stream.to_client, wire_out())) lane_end();
        if (fds[1].revents) {
            if (signals_take()) lane_end();
            left = tree_reap(stream.pid, &stream.ending);
        }
        if (stream.ending.ended && waiting(&stream.to_client) < ROOM / 4) { /* the last of the output, then how it ended */
            bool more = stream.out >= 0 && pass(&stream.out, OUT);
            more |= stream.err >= 0 && pass(&stream.err, ERR);
            if (more) continue;
            int status = stream.ending.status, number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
            uint32_t told[2] = {(uint32_t)(number ? 128 + number : WEXITSTATUS(status)), (uint32_t)number};
            frame_out(EXIT, told, sizeof told);
            while (waiting(&stream.to_client)) {
                struct pollfd conn = {wire_out(), POLLOUT, 0};
                if (poll(&conn, 1, -1) > 0 && !flush(&stream.to_client, wire_out())) lane_end();
            }
            return left;
        }
    }
}

static int terminal_pair(int *ours, int *theirs) {
    char name[64];
    int fd = high(open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK));
    unsigned number;
    int unlocked = 0;
    if (fd < 0) return -1;
    *ours = fd;
    if (ioctl(fd, TIOCSPTLCK, &unlocked)) return -1;
    *theirs = ioctl(fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC); /* without a path: /dev/pts may be elsewhere */
    if (*theirs < 0 && !ioctl(fd, TIOCGPTN, &number)) {
        snprintf(name, sizeof name, "/dev/pts/%u", number);
        *theirs = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    }
    *theirs = high(*theirs);
    return *theirs < 0 ? -1 : 0;
}

static int pipes(int *streams) {
    int in[2], out[2], err[2];
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) return -1;
    streams[0] = high(in[0]), stream.in = high(in[1]);
    streams[1] = high(out[1]), stream.out = high(out[0]);
    streams[2] = high(err[1]), stream.err = high(err[0]);
    fcntl(stream.in, F_SETFL, O_WRONLY | O_NONBLOCK);
    fcntl(stream.out, F_SETFL, O_NONBLOCK);
    fcntl(stream.err, F_SETFL, O_NONBLOCK);
    return 0;
}

static void close_ours(void) {
    if (stream.in >= 0 && !stream.terminal) close(stream.in);
    if (stream.out >= 0) close(stream.out);
    if (stream.err >= 0) close(stream.err);
}

void stream_open(uint32_t size) {
    struct cursor at = {wire_payload(size), NULL, false};
    at.end = at.at + size;
    uint32_t flags = take_u32(&at), rows = take_u32(&at), columns = take_u32(&at);
    struct text cwd = take_text(&at), user = take_text(&at);
    char **argv = take_list(&at), **env = take_list(&at);
    if (at.broken) lane_end();
    stream.to_program.at = stream.to_program.end = stream.to_client.at = stream.to_client.end = 0;
    stream.input_ended = false;
    stream.left = 0;
    stream.ending = (struct ending){0};
    stream.terminal = flags & TERMINAL;
    stream.in = stream.out = stream.err = -1;
    struct spawn spawn = {.argv = argv, .env = env, .cwd = cwd.bytes, .user = user.bytes, .terminal = stream.terminal};
    int *s = spawn.streams;
    s[0] = s[1] = s[2] = -1;
    bool fine = stream.terminal ? !terminal_pair(&stream.out, s) : !pipes(s);
    if (fine && stream.terminal) {
        s[1] = s[2] = s[0];
        stream.in = stream.out;
        resize(rows, columns);
    }
    stream.pid = fine ? spawn_start(&spawn) : 0;
    if (!fine) snprintf(spawn.problem, sizeof spawn.problem, "cannot make a terminal or pipes: %s\n", strerror(errno));
    if (s[0] >= 0) close(s[0]);
    if (s[1] >= 0 && s[1] != s[0]) close(s[1]), close(s[2]);
    free(argv);
    free(env);
    if (!stream.pid) {
        wire_fail(OF_REQUEST, 0, "%s", spawn.problem);
        close_ours();
        return;
    }
    my_seat->session = stream.pid;
    wire_send(OK, NULL, 0);
    wire_blocking(false);
    bool left = carry();
    wire_blocking(true);
    my_seat->session = 0;
    if (left && stream.terminal) { /* a terminal that closes hangs up who is left; theirs to survive */
        close_ours();
        lane_hand_over(-1, -1);
    } else if (left) {
        if (stream.in >= 0) close(stream.in);
        lane_hand_over(stream.out, stream.err);
    } else {
        close_ours();
    }
}
