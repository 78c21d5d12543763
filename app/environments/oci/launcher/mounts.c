/* The environment's file system: the image's layers with one of its own above, then what every container has. */
#include "launcher.h"

#include <linux/mount.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* Not from sys/mount.h, which some versions of the C library do not let stand beside the kernel's header. */
enum { DETACH = 2 };

static int move_to(int tree, int folder, const char *path) {
    unsigned flags = MOVE_MOUNT_F_EMPTY_PATH | (*path ? 0 : MOVE_MOUNT_T_EMPTY_PATH);
    return (int)syscall(SYS_move_mount, tree, "", folder, path, flags);
}

static int restrict_to(int fd, uint64_t set, int users) {
    struct mount_attr how = {.attr_set = set, .userns_fd = users < 0 ? 0 : (uint64_t)users};
    return (int)syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &how, sizeof how);
}

static int copy_of(const char *folder) {
    return (int)syscall(SYS_open_tree, AT_FDCWD, folder, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
}

static int do_mount(const char *source, const char *target, const char *kind, unsigned long flags, const char *data) {
    return (int)syscall(SYS_mount, source, target, kind, flags, data);
}

/* --- On the host's side: in a copy of its mounts that ends with us --------------------------------------------- */

void mounts_apart(void) {
    if (setns(PLAIN_MOUNTS, CLONE_NEWNS)) fail("mounts", "join");
    if (unshare(CLONE_NEWNS)) fail("mounts", "leave");
    if (do_mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("mounts", "private");
}

void mount_translated(const char *folder, const char *target) {
    int tree = copy_of(folder);
    if (tree < 0 || restrict_to(tree, MOUNT_ATTR_IDMAP, TRANSLATION) || move_to(tree, AT_FDCWD, target))
        fail("translate", folder);
    close(tree);
}

/* From inside of BASE, so that the names of 127 layers fit into the kernel's page of options. No syncs to disk where
 * the kernel knows that (5.10): an environment does not outlive its host's power. */
void mount_overlay(const char *base, const char *target, const char *options) {
    char whole[4096];
    if (chdir(base)) fail("overlay", base);
    if (snprintf(whole, sizeof whole, "%s,volatile", options) >= (int)sizeof whole)
        fail_because("overlay", target, "more layers than one mount can name");
    if (!do_mount("overlay", target, "overlay", MS_NODEV, whole)) return;
    if (errno != EINVAL || do_mount("overlay", target, "overlay", MS_NODEV, options)) fail("overlay", target);
}

void open_root(const char *target) {
    root = open(target, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 || chdir("/")) fail("root", target);
}

/* A folder of the host, read-only and without what its programs could gain rights by. Its owners are translated where
 * its file system can. */
void show(const char *folder, const char *path) {
    int place = open_inside(path, O_PATH | O_DIRECTORY, false), tree = copy_of(folder);
    if (place < 0 || tree < 0) fail("show", folder);
    if (restrict_to(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, -1)) fail("show", folder);
    (void)restrict_to(tree, MOUNT_ATTR_IDMAP, TRANSLATION);
    if (move_to(tree, place, "")) fail("show", path);
    close(place);
    close(tree);
}

/* The child has a copy of the mounts that it may not take apart; of a copy of its own it can make its root. */
void own_root(const char *target) {
    close(root);
    if (do_mount(target, target, NULL, MS_BIND | MS_REC, NULL)) fail("own", target);
    open_root(target);
}

/* --- On the environment's side ---------------------------------------------------------------------------------- */

/* The folder to mount at, made if missing. */
static int place_for(const char *step, const char *path, bool plain) {
    int place = open_inside(path, O_PATH | O_DIRECTORY, plain);
    if (place < 0 && errno == ENOENT && !plain) {
        make_folders(step, path, 0);
        place = open_inside(path, O_PATH | O_DIRECTORY, false);
    }
    if (place < 0) fail(step, path);
    return place;
}

/* What the kernel tells about itself is hidden by names below: those must be where everybody looks for them. */
static bool kernels_own(const char *kind) { return !strcmp(kind, "proc") || !strcmp(kind, "sysfs"); }

void mount_new(const char *kind, const char *source, const char *path, unsigned long flags, const char *options) {
    int place = place_for("mount", path, kernels_own(kind));
    if (do_mount(source, name_of(place), kind, flags, *options ? options : NULL)) fail("mount", path);
    close(place);
}

/* Add to the flags of the mount at PATH; none is ever taken away, which the kernel would refuse us. */
static void restrict_at(const char *step, const char *path, uint64_t set) {
    int fd = open_inside(path, O_PATH, false);
    if (fd < 0 || restrict_to(fd, set, -1)) fail(step, path);
    close(fd);
}

void mount_bound(const char *source, const char *path, unsigned long flags) {
    int place = place_for("bind", path, false);
    if (do_mount(source, name_of(place), NULL, MS_BIND, NULL)) fail("bind", source);
    close(place);
    uint64_t set = 0;
    if (flags & MS_RDONLY) set |= MOUNT_ATTR_RDONLY;
    if (flags & MS_NOSUID) set |= MOUNT_ATTR_NOSUID;
    if (flags & MS_NODEV) set |= MOUNT_ATTR_NODEV;
    if (flags & MS_NOEXEC) set |= MOUNT_ATTR_NOEXEC;
    if (set) restrict_at("bind", path, set);
}

/* A device is the host's own: nobody inside could make one. */
void device(const char *source, const char *path) {
    int place = open_inside(path, O_PATH, true);
    if (place < 0) {
        const char *name = strrchr(path, '/');
        char folder[256];
        snprintf(folder, sizeof folder, "%.*s", name ? (int)(name - path) : 0, path);
        int parent = open_inside(folder, O_PATH | O_DIRECTORY, true);
        int file = parent < 0 ? -1 : openat(parent, name ? name + 1 : path, O_CREAT | O_EXCL | O_CLOEXEC | O_RDONLY, 0666);
        if (file < 0) fail("device", path);
        close(parent);
        place = file;
    }
    if (do_mount(source, name_of(place), NULL, MS_BIND, NULL)) fail("device", source);
    close(place);
    restrict_at("device", path, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
}

/* Read-only from now on, once everything in it has been made. */
void protect(const char *path) { restrict_at("protect", path, MOUNT_ATTR_RDONLY); }

void link_to(const char *target, const char *path) {
    const char *name = strrchr(path, '/');
    char folder[256];
    snprintf(folder, sizeof folder, "%.*s", name ? (int)(name - path) : 0, path);
    int parent = open_inside(folder, O_PATH | O_DIRECTORY, true);
    if (parent < 0 || (symlinkat(target, parent, name ? name + 1 : path) && errno != EEXIST)) fail("link", path);
    close(parent);
}

/* Something empty that cannot be written in its place; fine when it is not there. */
void hide(const char *path) {
    int place = open_inside(path, O_PATH, true);
    struct stat about;
    if (place < 0 && (errno == ENOENT || errno == EACCES)) return;
    if (place < 0 || fstat(place, &about)) fail("hide", path);
    int failed = S_ISDIR(about.st_mode) ? do_mount("tmpfs", name_of(place), "tmpfs", MS_RDONLY, "size=0k")
                                        : do_mount("/dev/null", name_of(place), NULL, MS_BIND, NULL);
    if (failed) fail("hide", path);
    close(place);
    restrict_at("hide", path, MOUNT_ATTR_RDONLY);
}

/* Read-only from here down; fine when it is not there. */
void freeze(const char *path) {
    int place = open_inside(path, O_PATH, true);
    if (place < 0 && (errno == ENOENT || errno == EACCES)) return;
    char self[32];
    snprintf(self, sizeof self, "%s", place < 0 ? "" : name_of(place));
    if (place < 0 || do_mount(self, self, NULL, MS_BIND | MS_REC, NULL)) fail("freeze", path);
    close(place);
    restrict_at("freeze", path, MOUNT_ATTR_RDONLY);
}

void enter(bool read_only) {
    if (read_only && restrict_to(root, MOUNT_ATTR_RDONLY, -1)) fail("enter", "read-only");
    if (fchdir(root) || syscall(SYS_pivot_root, ".", ".")) fail("enter", "root");
    if (syscall(SYS_umount2, ".", DETACH)) fail("enter", "host");
    if (chdir("/")) fail("enter", "/");
}
