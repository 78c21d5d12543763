/* Frames on a lane: version, kind, zero, length; little-endian. */
#include "helper.h"

#include <poll.h>
#include <stdarg.h>

static int in_fd = -1, out_fd = -1;
static unsigned char buffer[CHUNK];
static size_t at, end;

void wire_open(int in, int out) {
    in_fd = in;
    out_fd = out;
}

int wire_in(void) { return in_fd; }

int wire_out(void) { return out_fd; }

void wire_blocking(bool blocking) {
    int flag = blocking ? 0 : O_NONBLOCK;
    fcntl(in_fd, F_SETFL, (fcntl(in_fd, F_GETFL) & ~O_NONBLOCK) | flag);
    fcntl(out_fd, F_SETFL, (fcntl(out_fd, F_GETFL) & ~O_NONBLOCK) | flag);
}

bool wire_pending(void) { return at < end; }

static void fill(void) {
    if (at == end) at = end = 0;
    if (end == sizeof buffer) {
        memmove(buffer, buffer + at, end - at);
        end -= at;
        at = 0;
    }
    ssize_t n;
    while ((n = read(in_fd, buffer + end, sizeof buffer - end)) < 0) {
        if (errno == EAGAIN) poll(&(struct pollfd){in_fd, POLLIN, 0}, 1, -1);
        else if (errno != EINTR) lane_end();
    }
    if (n == 0) lane_end();
    end += (size_t)n;
}

static uint32_t u32_at(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

struct frame wire_next(void) {
    while (end - at < HEADER) fill();
    unsigned char *p = buffer + at;
    at += HEADER;
    struct frame frame = {.kind = p[1], .size = u32_at(p + 4)};
    if (p[0] != VERSION || frame.size > MAX_REQUEST) lane_end();
    return frame;
}

size_t wire_some(uint32_t left, unsigned char **piece) {
    if (!left) return 0;
    if (at == end) fill();
    size_t n = end - at < left ? end - at : left;
    *piece = buffer + at;
    at += n;
    return n;
}

void wire_skip(uint32_t size) {
    unsigned char *piece;
    while (size) size -= (uint32_t)wire_some(size, &piece);
}

unsigned char *wire_payload(uint32_t size) {
    static unsigned char *payload;
    static size_t room;
    if (size > room) {
        free(payload);
        payload = malloc(size);
        room = payload ? size : 0;
        if (!payload) lane_end();
    }
    unsigned char *piece;
    for (uint32_t have = 0; have < size;) {
        size_t n = wire_some(size - have, &piece);
        memcpy(payload + have, piece, n);
        have += (uint32_t)n;
    }
    return payload;
}

void wire_sendv(enum kind kind, struct iovec *parts, int count) {
    unsigned char header[HEADER] = {VERSION, (unsigned char)kind};
    uint64_t size = 0;
    for (int i = 1; i < count; i++) size += parts[i].iov_len;
    for (int i = 0; i < 4; i++) header[4 + i] = (unsigned char)(size >> 8 * i);
    parts[0] = (struct iovec){header, HEADER};
    while (count) {
        ssize_t n = writev(out_fd, parts, count);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) lane_end();
        for (; count && (size_t)n >= parts->iov_len; parts++, count--) n -= (ssize_t)parts->iov_len;
        if (count) {
            parts->iov_base = (char *)parts->iov_base + n;
            parts->iov_len -= (size_t)n;
        }
    }
}

void wire_send(enum kind kind, const void *bytes, size_t size) {
    struct iovec parts[2] = {{0}, {(void *)bytes, size}};
    wire_sendv(kind, parts, 2);
}

void wire_fail(enum failure what, int number, const char *format, ...) {
    unsigned char message[1024] = {(unsigned char)what, 0, 0, 0};
    memcpy(message + 4, &number, 4);
    va_list values;
    va_start(values, format);
    int n = vsnprintf((char *)message + 8, sizeof message - 8, format, values);
    va_end(values);
    size_t size = n < 0 ? 0 : (size_t)n < sizeof message - 9 ? (size_t)n : sizeof message - 9;
    wire_send(FAILED, message, 8 + size);
}

/* --- Fields ----------------------------------------------------------------------------------------------------- */

static unsigned char *take(struct cursor *c, size_t size) {
    static unsigned char nothing[8];
    if (c->broken || (size_t)(c->end - c->at) < size) {
        c->broken = true;
        return size <= sizeof nothing ? nothing : NULL;
    }
    unsigned char *p = c->at;
    c->at += size;
    return p;
}

uint32_t take_u32(struct cursor *c) { return u32_at(take(c, 4)); }

uint64_t take_u64(struct cursor *c) {
    uint64_t low = take_u32(c);
    return low | (uint64_t)take_u32(c) << 32;
}

struct text take_text(struct cursor *c) {
    uint32_t size = take_u32(c);
    char *bytes = (char *)take(c, (size_t)size + 1);
    if (c->broken || bytes[size] != 0) {
        c->broken = true;
        return (struct text){"", 0};
    }
    return (struct text){bytes, size};
}

char **take_list(struct cursor *c) {
    uint32_t count = take_u32(c);
    if (c->broken || count > (size_t)(c->end - c->at) / 5) {
        c->broken = true;
        count = 0;
    }
    char **list = calloc((size_t)count + 1, sizeof *list);
    if (!list) lane_end();
    for (uint32_t i = 0; i < count; i++) list[i] = take_text(c).bytes;
    return list;
}
