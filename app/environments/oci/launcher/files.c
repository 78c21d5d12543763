/* Files of the environment, found without ever leaving it: what an image has in the place of a folder may be a link. */
#include "launcher.h"

#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>

enum { MOST_LINKS = 40, LONGEST = 4096, MOST_TRIES = 256 };

int root = -1;

/* Where a name goes up, the kernel asks us to try again when anything was moved or mounted on the host meanwhile. */
static int open_below(const char *path, int flags, uint64_t how) {
    struct open_how wanted = {.flags = (uint64_t)flags | O_CLOEXEC, .resolve = how | RESOLVE_NO_MAGICLINKS};
    int fd, tries = 0;
    do fd = (int)syscall(SYS_openat2, root, *path ? path : ".", &wanted, sizeof wanted);
    while (fd < 0 && errno == EAGAIN && ++tries < MOST_TRIES);
    return fd;
}

int open_inside(const char *path, int flags, bool plain) {
    while (*path == '/') path++;
    return open_below(path, flags, RESOLVE_IN_ROOT | (plain ? RESOLVE_NO_SYMLINKS : 0));
}

const char *name_of(int fd) {
    static char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    return name;
}

void write_to(const char *step, const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text)) fail(step, path);
    close(fd);
}

/* One folder NAME of the folder PARENT; where a link to nowhere has its place, true, and where that leads in `other`. */
static bool make_one(const char *step, const char *parent, const char *name, uid_t owner, char *other) {
    int folder = open_inside(parent, O_PATH | O_DIRECTORY, false);
    if (folder < 0) fail(step, parent);
    bool led_on = false;
    if (!mkdirat(folder, name, 0755)) {
        if (fchownat(folder, name, owner, owner, AT_SYMLINK_NOFOLLOW) && owner) fail(step, name);
    } else if (errno == EEXIST) {
        char target[LONGEST];
        ssize_t size = readlinkat(folder, name, target, sizeof target - 1);
        if (size < 0) fail_because(step, name, "it is there, and no folder");
        target[size] = 0;
        int wanted = snprintf(other, LONGEST, "%s%s%s", *target == '/' ? "" : parent, *target == '/' ? "" : "/", target);
        if (wanted >= LONGEST) fail_because(step, name, "a link leads to a name that is too long");
        led_on = true;
    } else {
        fail(step, name);
    }
    close(folder);
    return led_on;
}

static void make_all(const char *step, const char *path, uid_t owner, int links) {
    char done[LONGEST] = "", rest[LONGEST], other[LONGEST], *left = rest;
    if (strlen(path) >= sizeof rest) fail_because(step, path, "the name is too long");
    strcpy(rest, path);
    for (char *name; (name = strsep(&left, "/"));) {
        if (!*name || !strcmp(name, ".")) continue;
        char whole[LONGEST];
        snprintf(whole, sizeof whole, "%s/%s", done, name);
        int fd = open_inside(whole, O_PATH | O_DIRECTORY, false);
        if (fd >= 0) {
            close(fd);
        } else if (errno != ENOENT) {
            fail(step, whole);
        } else if (make_one(step, done, name, owner, other)) {
            if (!links) fail_because(step, whole, "too many links");
            make_all(step, other, owner, links - 1);
        }
        strcpy(done, whole);
    }
}

void make_folders(const char *step, const char *path, uid_t owner) {
    int fd = open_inside(path, O_PATH | O_DIRECTORY, false);
    if (fd >= 0) close(fd);
    else make_all(step, path, owner, MOST_LINKS);
}
