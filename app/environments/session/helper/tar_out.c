/* A folder as a tar: ustar, with pax headers where a name or a size does not fit. Sockets, pipes, devices are left out. */
#include "helper.h"

#include <dirent.h>
#include <sys/stat.h>

enum { BLOCK = 512, DEEPEST = 200 };

static unsigned char bytes[CHUNK];
static size_t filled;
static int failed;
static char failed_at[640];

static void flush(void) {
    if (filled) wire_send(DATA, bytes, filled);
    filled = 0;
}

static void emit(const void *from, size_t size) {
    for (const unsigned char *at = from; size;) {
        size_t n = sizeof bytes - filled < size ? sizeof bytes - filled : size;
        if (at) {
            memcpy(bytes + filled, at, n);
            at += n;
        } else {
            memset(bytes + filled, 0, n);
        }
        filled += n;
        size -= n;
        if (filled == sizeof bytes) flush();
    }
}

static void pad(uint64_t size) { emit(NULL, (BLOCK - size % BLOCK) % BLOCK); }

static bool fail(const char *name) {
    failed = errno;
    snprintf(failed_at, sizeof failed_at, "%.600s", name);
    return false;
}

static void header(const char *name, const char *link, char type, const struct stat *about, uint64_t size) {
    unsigned char block[BLOCK + 8] = {0};
    char *b = (char *)block;
    snprintf(b, 101, "%.100s", name);
    snprintf(b + 100, 8, "%07o", (unsigned)about->st_mode & 07777);
    snprintf(b + 108, 8, "%07o", (unsigned)about->st_uid & 07777777);
    snprintf(b + 116, 8, "%07o", (unsigned)about->st_gid & 07777777);
    snprintf(b + 124, 12, "%011llo", (unsigned long long)size & 077777777777ULL);
    snprintf(b + 136, 12, "%011llo", (unsigned long long)(about->st_mtime < 0 ? 0 : about->st_mtime) & 077777777777ULL);
    memset(b + 148, ' ', 8);
    b[156] = type;
    memcpy(b + 157, link, strnlen(link, 100));
    memcpy(b + 257, "ustar\0" "00", 8);
    unsigned sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += block[i];
    snprintf(b + 148, 8, "%06o", sum);
    emit(block, BLOCK);
}

static void record(char *to, size_t *at, const char *key, const char *value) {
    size_t rest = strlen(key) + strlen(value) + 3, length = rest + 1;
    for (size_t digits = 1, limit = 10; rest + digits >= limit; digits++, limit *= 10) length = rest + digits + 1;
    *at += (size_t)sprintf(to + *at, "%zu %s=%s\n", length, key, value);
}

static void member(const char *name, const char *link, char type, const struct stat *about, uint64_t size) {
    static char records[3 * 4096];
    size_t used = 0;
    char number[32];
    if (strlen(name) > 100) record(records, &used, "path", name);
    if (strlen(link) > 100) record(records, &used, "linkpath", link);
    if (size > 077777777777ULL) {
        snprintf(number, sizeof number, "%llu", (unsigned long long)size);
        record(records, &used, "size", number);
    }
    if (used) {
        struct stat plain = {.st_mode = 0644};
        header("pax", "", 'x', &plain, used);
        emit(records, used);
        pad(used);
    }
    header(name, link, type, about, size);
}

/* As long as the header says, whatever happens to the file meanwhile. */
static bool content(int fd, const char *name, uint64_t size) {
    for (uint64_t left = size; left;) {
        size_t room = sizeof bytes - filled < left ? sizeof bytes - filled : (size_t)left;
        ssize_t n = read(fd, bytes + filled, room);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail(name);
        if (n == 0) {
            emit(NULL, (size_t)left);
            break;
        }
        filled += (size_t)n;
        left -= (uint64_t)n;
        if (filled == sizeof bytes) flush();
    }
    pad(size);
    return true;
}

static bool file(int folder, const char *entry, const char *name) {
    struct stat about;
    int fd = openat(folder, entry, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) return true; /* gone since it was listed */
    if (fd < 0 || fstat(fd, &about)) return fail(name);
    bool fine = true;
    if (S_ISREG(about.st_mode)) {
        member(name, "", '0', &about, (uint64_t)about.st_size);
        fine = content(fd, name, (uint64_t)about.st_size);
    }
    close(fd);
    return fine;
}

static bool walk(int folder, char *name, size_t length, int depth);

static bool visit(int folder, const char *entry, char *name, size_t length, int depth) {
    struct stat about;
    char link[4096] = "";
    if (fstatat(folder, entry, &about, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? true : fail(name);
    if (S_ISREG(about.st_mode)) return file(folder, entry, name);
    if (S_ISLNK(about.st_mode)) {
        ssize_t n = readlinkat(folder, entry, link, sizeof link - 1);
        if (n >= 0) member(name, link, '2', &about, 0);
        return true;
    }
    if (!S_ISDIR(about.st_mode)) return true;
    name[length++] = '/';
    name[length] = 0;
    member(name, "", '5', &about, 0);
    int below = openat(folder, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return below < 0 ? fail(name) : walk(below, name, length, depth + 1);
}

/* Takes over the descriptor. */
static bool walk(int folder, char *name, size_t length, int depth) {
    DIR *list = depth < DEEPEST ? fdopendir(folder) : NULL;
    if (!list) {
        if (depth >= DEEPEST) errno = ELOOP;
        close(folder);
        return fail(name);
    }
    bool fine = true;
    for (struct dirent *entry; fine && (entry = readdir(list));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        size_t n = strlen(entry->d_name);
        if (length + n > 4000) {
            errno = ENAMETOOLONG;
            fine = fail(name);
            break;
        }
        memcpy(name + length, entry->d_name, n + 1);
        fine = visit(dirfd(list), entry->d_name, name, length + n, depth);
        name[length] = 0;
    }
    closedir(list);
    return fine;
}

void tar_get(uint32_t size) {
    static char name[4200];
    struct cursor at = {wire_payload(size), NULL, false};
    at.end = at.at + size;
    struct text path = take_text(&at);
    if (at.broken) lane_end();
    filled = 0;
    name[0] = 0;
    int folder = open(path.bytes, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool fine = folder < 0 ? fail(path.bytes) : walk(folder, name, 0, 0);
    if (!fine) {
        wire_fail(OF_SYSTEM, failed, "%.600s: %s", failed_at, strerror(failed));
        return;
    }
    emit(NULL, 2 * BLOCK);
    flush();
    wire_send(END, NULL, 0);
}
