/* A stream of a command, bounded: one buffer whose first part is the head and whose second becomes a ring. */
#include "helper.h"

struct log no_log = {0};

static unsigned char scratch[1 << 16];

void capture_begin(struct capture *c, uint32_t head, uint32_t tail) {
    c->at = 0;
    c->total = 0;
    c->head = head;
    c->tail = tail;
}

/* Room for the next piece: grown while the output is short, else the ring's next stretch. */
static size_t room_in(struct capture *c, unsigned char **at) {
    size_t full = (size_t)c->head + c->tail;
    if (c->at == full) {
        c->at = c->head;
        if (!c->tail) {
            c->at = full;
            *at = scratch;
            return sizeof scratch;
        }
    }
    if (c->at == c->room && c->room < full) {
        size_t more = c->room ? c->room * 2 : 1 << 16;
        if (more > full) more = full;
        unsigned char *grown = realloc(c->bytes, more);
        if (!grown) lane_end();
        c->bytes = grown;
        c->room = more;
    }
    *at = c->bytes + c->at;
    size_t until = c->room < full ? c->room : full;
    return until - c->at;
}

static void note(struct capture *c, size_t n) {
    c->total += n;
    if (c->at < (size_t)c->head + c->tail) c->at += n;
}

static void send_log(struct log *log, const unsigned char *bytes, size_t n) {
    if (n > log->left) n = (size_t)log->left;
    log->left -= n;
    for (size_t done = 0; done < n; done += CHUNK)
        wire_send(log->kind, bytes + done, n - done < CHUNK ? n - done : CHUNK);
}

/* The stream passes its bound with this piece: what was kept is all of it so far, and goes before. */
static void pass_bound(const struct capture *c, struct log *log, const unsigned char *piece, size_t n) {
    if (!log->begun && c->total > (uint64_t)c->head + c->tail) log->left = 0; /* nobody listened: it cannot be whole */
    if (!log->begun) send_log(log, c->bytes, (size_t)c->total);
    log->begun = true;
    send_log(log, piece, n);
}

static void feed(struct capture *c, const unsigned char *bytes, size_t left) {
    while (left) {
        unsigned char *at;
        size_t n = room_in(c, &at);
        if (n > left) n = left;
        if (at != bytes) memcpy(at, bytes, n);
        note(c, n);
        bytes += n;
        left -= n;
    }
}

ssize_t capture_read(struct capture *c, int fd, struct log *log) {
    unsigned char *at;
    size_t room = room_in(c, &at);
    uint64_t full = (uint64_t)c->head + c->tail;
    /* A small ring must not mean small reads; and what the log has not got yet is not written over. */
    if (room < sizeof scratch / 2 || (log->left && !log->begun && c->total == full)) {
        at = scratch;
        room = sizeof scratch;
    }
    ssize_t n = read(fd, at, room);
    if (n <= 0) return n;
    if (log->left && c->total + (uint64_t)n > full) pass_bound(c, log, at, (size_t)n);
    if (at == scratch) feed(c, scratch, (size_t)n);
    else note(c, (size_t)n);
    return n;
}

void capture_text(struct capture *c, const char *text) { feed(c, (const unsigned char *)text, strlen(text)); }

void capture_release(struct capture *c) {
    if (c->room <= 1 << 18) return;
    free(c->bytes);
    c->bytes = NULL;
    c->room = 0;
}

size_t capture_kept(const struct capture *c) {
    size_t full = (size_t)c->head + c->tail;
    return c->total < full ? (size_t)c->total : full;
}

int capture_parts(const struct capture *c, struct iovec *parts) {
    size_t full = (size_t)c->head + c->tail;
    if (c->total <= full) {
        parts[0] = (struct iovec){c->bytes, (size_t)c->total};
        return c->total ? 1 : 0;
    }
    /* head, then the ring from its oldest byte: the buffer's end, and what was wrapped around */
    parts[0] = (struct iovec){c->bytes, c->head};
    parts[1] = (struct iovec){c->bytes + c->at, full - c->at};
    parts[2] = (struct iovec){c->bytes + c->head, c->at - c->head};
    return 3;
}
