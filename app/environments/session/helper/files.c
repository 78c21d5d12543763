/* One file in, one file out. */
#include "helper.h"

#include <sys/stat.h>

/* --- What the client sends after a request: DATA frames up to an END ---------------------------------------------- */

static uint32_t body_left;
static bool body_ended;

void body_begin(void) {
    body_left = 0;
    body_ended = false;
}

size_t body_some(unsigned char **piece, size_t most) {
    while (!body_left && !body_ended) {
        struct frame frame = wire_next();
        if (frame.kind == END) body_ended = true;
        else if (frame.kind != DATA) lane_end();
        body_left = frame.size;
    }
    if (body_ended) return 0;
    size_t n = wire_some(body_left < most ? body_left : (uint32_t)most, piece);
    body_left -= (uint32_t)n;
    return n;
}

void body_drop(void) {
    unsigned char *piece;
    while (body_some(&piece, CHUNK)) {}
}

int write_all(int fd, const unsigned char *bytes, size_t size) {
    while (size) {
        ssize_t n = write(fd, bytes, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        bytes += n;
        size -= (size_t)n;
    }
    return 0;
}

/* --- In --------------------------------------------------------------------------------------------------------- */

/* The folders above `path`; those that exist may be anything that leads on. */
int make_parents(char *path) {
    for (char *at = *path ? strchr(path + 1, '/') : NULL; at; at = strchr(at + 1, '/')) {
        *at = 0;
        int failed = mkdir(path, 0755) && errno != EEXIST ? errno : 0;
        *at = '/';
        if (failed && failed != EROFS && failed != EACCES) { /* those two may be said of a folder that exists */
            errno = failed;
            return -1;
        }
    }
    return 0;
}

static int open_for_writing(char *path) {
    const int how = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    int fd = open(path, how, 0600);
    if (fd < 0 && errno == ENOENT && !make_parents(path)) fd = open(path, how, 0600);
    if (fd < 0 && errno == ETXTBSY && !unlink(path)) fd = open(path, how, 0600); /* a program that runs */
    struct stat about;
    if (fd >= 0 && !fstat(fd, &about) && !S_ISREG(about.st_mode)) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

void file_put(uint32_t size) {
    struct cursor at = {wire_payload(size), NULL, false};
    at.end = at.at + size;
    uint32_t mode = take_u32(&at);
    struct text path = take_text(&at);
    if (at.broken) lane_end();
    body_begin();
    int fd = open_for_writing(path.bytes);
    bool failed = fd < 0;
    int number = errno;
    unsigned char *piece;
    for (size_t n; !failed && (n = body_some(&piece, CHUNK));)
        if (write_all(fd, piece, n)) {
            failed = true;
            number = errno;
            if (ftruncate(fd, 0)) errno = number; /* give back what a full disk could not hold */
        }
    if (!failed && fchmod(fd, mode & 07777)) {
        failed = true;
        number = errno;
    }
    if (fd >= 0 && close(fd) && !failed) {
        failed = true;
        number = errno;
    }
    body_drop();
    if (failed) wire_fail(OF_SYSTEM, number, "%.700s: %s", path.bytes, strerror(number));
    else wire_send(OK, NULL, 0);
}

/* --- Out -------------------------------------------------------------------------------------------------------- */

void file_get(uint32_t size) {
    static unsigned char bytes[CHUNK];
    struct cursor at = {wire_payload(size), NULL, false};
    at.end = at.at + size;
    struct text path = take_text(&at);
    if (at.broken) lane_end();
    int fd = open(path.bytes, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    int number = fd < 0 ? errno : 0;
    struct stat about;
    if (fd >= 0 && !fstat(fd, &about) && !S_ISREG(about.st_mode)) number = S_ISDIR(about.st_mode) ? EISDIR : EINVAL;
    ssize_t n = 0;
    while (!number && (n = read(fd, bytes, sizeof bytes))) {
        if (n > 0) wire_send(DATA, bytes, (size_t)n);
        else if (errno != EINTR) number = errno;
    }
    if (fd >= 0) close(fd);
    if (number) wire_fail(OF_SYSTEM, number, "%.700s: %s", path.bytes, strerror(number));
    else wire_send(END, NULL, 0);
}
