/* A port of this network's loopback, carried over stdin and stdout: for environments whose network cannot be entered.
 *
 *   relay PORT CONNECTIONS      PORT 0: one that is free; CONNECTIONS: at a time, at most 64
 *
 * A frame is 8 bytes (kind, 0, connection as u16, length as u32, little-endian) and its payload:
 *   R out      ready; the port as u16
 *   O out      a connection has begun
 *   D both     its bytes, at most what the other side gave credit for
 *   C both     credit: so many bytes (u32) of D have been passed on. Both begin with WINDOW
 *   E both     no more bytes will come this way
 *   X both     it is over. A number is used again when both have said so
 * It ends with its input. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 64, WINDOW = 256 << 10, PIECE = 32 << 10 };

struct connection {
    int fd;         /* -1: closed */
    int used;       /* has this number */
    int read_all;   /* E was sent */
    int told_all;   /* E came: end the other way when all is written */
    int over;       /* X came */
    int said_over;  /* X was sent */
    uint32_t credit; /* that we may still send out */
    uint32_t waiting, at; /* in `buffer`, from `at` on, to be written to fd */
    unsigned char *buffer;
};

static struct connection all[MOST];
static int most, open_count, listeners[2] = {-1, -1};

static void write_all(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t done = write(1, at, size);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) exit(0); /* nobody is there */
        at += done, size -= (size_t)done;
    }
}

static void read_all(void *data, size_t size) {
    char *at = data;
    while (size) {
        ssize_t done = read(0, at, size);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) exit(0);
        at += done, size -= (size_t)done;
    }
}

static void say(char kind, unsigned number, const void *data, uint32_t size) {
    static unsigned char frame[8 + PIECE];
    frame[0] = (unsigned char)kind, frame[1] = 0, frame[2] = number & 255, frame[3] = (unsigned char)(number >> 8);
    for (int i = 0; i < 4; i++) frame[4 + i] = (size >> (8 * i)) & 255;
    memcpy(frame + 8, data ? data : "", data ? size : 0);
    write_all(frame, 8 + size);
}

static void say_credit(unsigned number, uint32_t size) {
    unsigned char data[4];
    for (int i = 0; i < 4; i++) data[i] = (size >> (8 * i)) & 255;
    say('C', number, data, 4);
}

/* The number is free again once both sides have said that it is over. */
static void settle(struct connection *c) {
    if (c->over && c->said_over) {
        free(c->buffer);
        *c = (struct connection){.fd = -1};
        open_count--;
    }
}

static void end(struct connection *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    if (!c->said_over) say('X', (unsigned)(c - all), NULL, 0);
    c->said_over = 1;
}

static int listening(int family, uint16_t port) {
    int one = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
    int bound = family == AF_INET ? bind(fd, (void *)&v4, sizeof v4) : bind(fd, (void *)&v6, sizeof v6);
    if (bound == 0 && listen(fd, 128) == 0) return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

static void take(int listener) {
    int one = 1, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct connection *c = all;
    while (c->used) c++;
    unsigned char *buffer = malloc(WINDOW);
    if (!buffer) {
        close(fd);
        return;
    }
    *c = (struct connection){.fd = fd, .used = 1, .credit = WINDOW, .buffer = buffer};
    open_count++;
    say('O', (unsigned)(c - all), NULL, 0);
}

static void from_socket(struct connection *c) {
    static unsigned char data[PIECE];
    ssize_t got = read(c->fd, data, c->credit < PIECE ? c->credit : PIECE);
    if (got > 0) {
        c->credit -= (uint32_t)got;
        say('D', (unsigned)(c - all), data, (uint32_t)got);
    } else if (got == 0) {
        c->read_all = 1;
        say('E', (unsigned)(c - all), NULL, 0);
    } else if (errno != EAGAIN && errno != EINTR) {
        end(c);
    }
}

static void to_socket(struct connection *c) {
    while (c->waiting) {
        ssize_t done = send(c->fd, c->buffer + c->at, c->waiting, MSG_NOSIGNAL);
        if (done < 0 && errno == EAGAIN) return;
        if (done <= 0) {
            end(c);
            return;
        }
        c->at += (uint32_t)done, c->waiting -= (uint32_t)done;
        say_credit((unsigned)(c - all), (uint32_t)done);
    }
    c->at = 0;
    if (c->over) end(c);
    else if (c->told_all == 1) shutdown(c->fd, SHUT_WR), c->told_all = 2;
}

static void from_outside(void) {
    unsigned char head[8], data[PIECE];
    read_all(head, 8);
    uint32_t size = head[4] | head[5] << 8 | head[6] << 16 | (uint32_t)head[7] << 24;
    unsigned number = head[2] | (unsigned)head[3] << 8;
    if (size > PIECE || number >= MOST) exit(1);
    read_all(data, size);
    struct connection *c = all + number;
    if (!c->used) return;
    switch (head[0]) {
    case 'D':
        if (c->fd < 0) break;
        if (size > WINDOW - c->waiting) exit(1);
        if (c->at + c->waiting + size > WINDOW) memmove(c->buffer, c->buffer + c->at, c->waiting), c->at = 0;
        memcpy(c->buffer + c->at + c->waiting, data, size);
        c->waiting += size;
        break;
    case 'C': c->credit += data[0] | data[1] << 8 | data[2] << 16 | (uint32_t)data[3] << 24; break;
    case 'E': c->told_all = 1; break;
    case 'X': c->over = 1; break;
    }
    if (c->fd >= 0) to_socket(c);
    settle(c);
}

int main(int count, char **words) {
    if (count != 3) return 2;
    signal(SIGPIPE, SIG_IGN);
    unlink(words[0]);
    most = atoi(words[2]) < MOST ? atoi(words[2]) : MOST;
    for (int i = 0; i < MOST; i++) all[i].fd = -1;
    for (int i = 0; i < 30; i++) { /* the relay of a former owner may be about to end */
        listeners[0] = listening(AF_INET, (uint16_t)atoi(words[1]));
        if (listeners[0] >= 0 || errno != EADDRINUSE) break;
        usleep(50000);
    }
    if (listeners[0] < 0) {
        fputs(strerror(errno), stdout);
        return 1;
    }
    struct sockaddr_in bound;
    socklen_t length = sizeof bound;
    getsockname(listeners[0], (void *)&bound, &length);
    uint16_t port = ntohs(bound.sin_port);
    listeners[1] = listening(AF_INET6, port);
    unsigned char ready[2] = {port & 255, (unsigned char)(port >> 8)};
    say('R', 0, ready, 2);
    for (;;) {
        struct pollfd polled[3 + MOST] = {{.fd = 0, .events = POLLIN}};
        for (int i = 0; i < 2; i++)
            polled[1 + i] = (struct pollfd){.fd = open_count < most ? listeners[i] : -1, .events = POLLIN};
        for (int i = 0; i < MOST; i++) {
            struct connection *c = all + i;
            short events = (short)((c->read_all || !c->credit ? 0 : POLLIN) | (c->waiting ? POLLOUT : 0));
            polled[3 + i] = (struct pollfd){.fd = events ? c->fd : -1, .events = events};
        }
        if (poll(polled, 3 + MOST, -1) < 0) continue;
        for (int i = 0; i < MOST; i++) {
            struct connection *c = all + i;
            short found = polled[3 + i].revents;
            if (found && c->fd >= 0 && c->waiting) to_socket(c);
            if (found && c->fd >= 0 && !c->read_all && c->credit) from_socket(c);
            if (c->used) settle(c);
        }
        for (int i = 0; i < 2; i++)
            if (polled[1 + i].revents && open_count < most) take(listeners[i]);
        if (polled[0].revents) from_outside();
    }
}
