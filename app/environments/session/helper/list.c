/* What there is below a folder and when each was changed last, on its file system alone. The first record is the time:
 * those changed after it have a later one. A record: a letter, nanoseconds, a space, the path, a zero. */
#include "helper.h"

#include <dirent.h>
#include <sys/stat.h>
#include <time.h>

enum { DEEPEST = 400, LONGEST = 4096 };

static char records[CHUNK];
static size_t filled;
static dev_t device;
static int failed;

static void tell(char what, const struct timespec *when, const char *path, size_t length) {
    if (filled + length + 32 > sizeof records) {
        wire_send(DATA, records, filled);
        filled = 0;
    }
    long long ns = (long long)when->tv_sec * 1000000000 + when->tv_nsec;
    filled += (size_t)sprintf(records + filled, "%c%lld ", what, ns);
    memcpy(records + filled, path, length);
    filled += length;
    records[filled++] = 0;
}

/* Takes over the descriptor. What goes meanwhile is left out; what cannot be looked at fails the whole. */
static bool walk(int folder, char *path, size_t length, int depth) {
    DIR *list = depth < DEEPEST ? fdopendir(folder) : NULL;
    if (!list) {
        failed = depth < DEEPEST ? errno : ELOOP;
        close(folder);
        return false;
    }
    bool fine = true;
    for (struct dirent *entry; fine && (entry = readdir(list));) {
        struct stat about;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        size_t n = strlen(entry->d_name), end = length + 1 + n;
        if (end >= LONGEST) {
            failed = ENAMETOOLONG;
            fine = false;
            break;
        }
        path[length] = '/';
        memcpy(path + length + 1, entry->d_name, n + 1);
        if (fstatat(dirfd(list), entry->d_name, &about, AT_SYMLINK_NOFOLLOW)) {
            fine = errno == ENOENT;
            failed = errno;
        } else if (!S_ISDIR(about.st_mode)) {
            tell(S_ISREG(about.st_mode) ? 'f' : S_ISLNK(about.st_mode) ? 'l' : 'o', &about.st_ctim, path, end);
        } else if (about.st_dev == device) {
            tell('d', &about.st_ctim, path, end);
            int below = openat(dirfd(list), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (below >= 0) fine = walk(below, path, end, depth + 1);
            else fine = (failed = errno) == ENOENT;
        }
    }
    closedir(list);
    return fine;
}

void list_get(uint32_t size) {
    static char path[LONGEST + 1];
    struct cursor at = {wire_payload(size), NULL, false};
    at.end = at.at + size;
    struct text asked = take_text(&at);
    if (at.broken) lane_end();
    struct stat about;
    struct timespec now;
    size_t length = strlen(asked.bytes) < LONGEST ? strlen(asked.bytes) : 0;
    memcpy(path, asked.bytes, length);
    while (length && path[length - 1] == '/') length--;
    path[length] = 0;
    filled = 0;
    int folder = open(length ? path : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0 || fstat(folder, &about) || clock_gettime(CLOCK_REALTIME_COARSE, &now)) {
        failed = errno;
        wire_fail(OF_SYSTEM, failed, "%.600s: %s", path, strerror(failed));
        return;
    }
    device = about.st_dev;
    tell('n', &now, "", 0);
    if (!walk(folder, path, length, 0)) {
        wire_fail(OF_SYSTEM, failed, "%.600s: %s", path, strerror(failed));
        return;
    }
    if (filled) wire_send(DATA, records, filled);
    wire_send(END, NULL, 0);
}
