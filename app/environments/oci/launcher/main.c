/* The steps, and the two processes that take them. */
#include "launcher.h"

#include <grp.h>
#include <linux/close_range.h>
#include <linux/keyctl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { MOST_ARGUMENTS = 64, MOST_WORDS = 4096, MOST_OF_USERS = 1 << 20 };

static int report = 2; /* where the last words go */
static char *arguments[MOST_ARGUMENTS], *variables[MOST_WORDS];
static int argument_count, variable_count;

_Noreturn static void say(int number, const char *step, const char *about, const char *why) {
    dprintf(report, "failed %d %s %s: %s\n", number, step, about, why);
    _exit(FAILED);
}

void fail(const char *step, const char *about) { say(errno, step, about, strerror(errno)); }

void fail_because(const char *step, const char *about, const char *why) { say(0, step, about, why); }

/* What it says never holds a variable's value, which may be a secret. */
static void keep(const char *what, char **list, int *count, int most, char *word) {
    if (*count + 1 >= most) fail_because("plan", what, "too many");
    list[(*count)++] = word;
}

/* --- The environment's first process ---------------------------------------------------------------------------- */

/* On the host's side: the numbers that those inside have out here, then wait until the child has become what it shall
 * be, or said why not. */
_Noreturn static void attend(pid_t child, int go, int words, const char *first, const char *size, const char *pid_file) {
    char path[64], line[64];
    snprintf(line, sizeof line, "0 %s %s\n", first, size);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", (int)child, i ? "uid_map" : "gid_map");
        write_to("born", path, line);
    }
    if (write(go, "", 1) != 1) fail("born", "go");
    char said[4096];
    ssize_t size_said = 0, n;
    while ((n = read(words, said + size_said, sizeof said - (size_t)size_said)) > 0) size_said += n;
    if (size_said) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        if (write(report, said, (size_t)size_said) < 0) _exit(FAILED);
        _exit(FAILED);
    }
    /* Nothing was said by one that was killed, too; that one has no program any more. */
    snprintf(path, sizeof path, "/proc/%d/exe", (int)child);
    if (n < 0 || readlink(path, line, sizeof line) < 0) fail_because("born", "child", "it was ended while it started");
    int fd = open(pid_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0 || dprintf(fd, "%d", (int)child) < 0) {
        int number = errno;
        kill(child, SIGKILL);
        say(number, "file", pid_file, strerror(number));
    }
    dprintf(report, "started %d\n", (int)child);
    _exit(DONE);
}

/* Become two: from here on the steps are the child's, in namespaces that its own users own. */
static void born(const char *first, const char *size, const char *pid_file) {
    int go[2], words[2];
    if (pipe2(go, O_CLOEXEC) || pipe2(words, O_CLOEXEC)) fail("born", "pipe");
    struct clone_args how = {
        .flags = CLONE_NEWUSER | CLONE_NEWPID,
        .exit_signal = SIGCHLD,
    };
    pid_t child = (pid_t)syscall(SYS_clone3, &how, sizeof how);
    if (child < 0) fail("born", "clone");
    if (child) {
        close(go[0]);
        close(words[1]);
        attend(child, go[1], words[0], first, size, pid_file);
    }
    close(go[1]);
    close(words[0]);
    report = words[1];
    char byte;
    if (read(go[0], &byte, 1) != 1) _exit(FAILED); /* our parent is gone, or has said why */
    close(go[0]);
    gid_t group = 0;
    if (setresgid(0, 0, 0) || setresuid(0, 0, 0) || setgroups(1, &group)) fail("born", "root inside");
    /* Whoever asked for us may end our parent, and cannot see us yet. */
    struct pollfd ours = {report, 0, 0};
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)) fail("born", "parent");
    if (poll(&ours, 1, 0) > 0) _exit(FAILED);
    /* Not before: some of what comes with these belongs to whoever we were when it was made. */
    if (unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET)) fail("born", "namespaces");
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) fail("born", "dumps");
    if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 && errno != ENOSYS) fail("born", "keyring");
}

/* Where root of the image is at home. What has the name of the file need not be one. */
static void home(void) {
    struct stat about;
    int fd = open("/etc/passwd", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    FILE *file = fd >= 0 && !fstat(fd, &about) && S_ISREG(about.st_mode) ? fdopen(fd, "r") : NULL;
    char line[4096];
    static char variable[4096] = "HOME=/";
    while (file && ftell(file) < MOST_OF_USERS && fgets(line, sizeof line, file)) {
        char *rest = line, *field[6];
        line[strcspn(line, "\n")] = 0;
        for (int i = 0; i < 6; i++) field[i] = rest ? strsep(&rest, ":") : "";
        if (strcmp(field[2], "0")) continue;
        if (*field[5] && snprintf(variable, sizeof variable, "HOME=%s", field[5]) >= (int)sizeof variable)
            fail_because("home", "/etc/passwd", "the name is too long");
        break;
    }
    if (file) fclose(file);
    keep("variables", variables, &variable_count, MOST_WORDS, variable);
}

static void default_signals(void) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int number = 1; number < _NSIG; number++) signal(number, SIG_DFL);
}

_Noreturn static void become(const char *kept) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 3; fd++)
        if (null < 0 || dup2(null, fd) != fd) fail("become", "/dev/null");
    setsid();
    umask(022);
    default_signals();
    if (fcntl(LISTENING, F_SETFD, 0)) fail("become", "listening");
    if (syscall(SYS_close_range, LISTENING + 1, ~0U, CLOSE_RANGE_CLOEXEC)) fail("become", "files");
    arguments[argument_count] = variables[variable_count] = NULL;
    if (prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)) fail("become", "parent");
    confine(strtoull(kept, NULL, 16));
    execve(arguments[0], arguments, variables);
    fail("become", arguments[0]);
}

/* --- The steps -------------------------------------------------------------------------------------------------- */

static void need(const char *path) {
    int fd = open_inside(path, O_PATH, false);
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) {
        dprintf(report, "lacking %s\n", path);
        _exit(FAILED);
    }
    if (fd < 0) fail("need", path);
    close(fd);
}

static unsigned long number(const char *word) { return strtoul(word, NULL, 10); }

typedef char **words;

static void do_new(words w) { if (mkdir(w[0], 0755)) fail("new", w[0]); }
static void do_make(words w) { if (mkdir(w[0], 0755) && errno != EEXIST) fail("make", w[0]); }
static void do_try(words w) { if (!access(w[0], F_OK)) write_to("try", w[0], w[1]); }
static void do_mounts(words w) { (void)w; mounts_apart(); }
static void do_translate(words w) { mount_translated(w[0], w[1]); }
static void do_overlay(words w) { mount_overlay(w[0], w[1], w[2]); }
static void do_root(words w) { open_root(w[0]); }
static void do_own(words w) { own_root(w[0]); }
static void do_need(words w) { need(w[0]); }
static void do_folder(words w) { make_folders("folder", w[0], (uid_t)number(w[1])); }
static void do_show(words w) { show(w[0], w[1]); }
static void do_limit(words w) { limit((int)number(w[0]), w[1]); }
static void do_write(words w) { write_to("write", w[0], w[1]); }
static void do_born(words w) { born(w[0], w[1], w[2]); }
static void do_loopback(words w) { (void)w; loopback(); }
static void do_mount(words w) { mount_new(w[0], w[1], w[2], number(w[3]), w[4]); }
static void do_bind(words w) { mount_bound(w[0], w[1], number(w[2])); }
static void do_device(words w) { device(w[0], w[1]); }
static void do_link(words w) { link_to(w[0], w[1]); }
static void do_hide(words w) { hide(w[0]); }
static void do_freeze(words w) { freeze(w[0]); }
static void do_protect(words w) { protect(w[0]); }
static void do_enter(words w) { enter(number(w[0])); }
static void do_hostname(words w) { if (sethostname(w[0], strlen(w[0]))) fail("hostname", w[0]); }
static void do_argument(words w) { keep("arguments", arguments, &argument_count, MOST_ARGUMENTS, w[0]); }
static void do_variable(words w) { keep("variables", variables, &variable_count, MOST_WORDS, w[0]); }
static void do_home(words w) { (void)w; home(); }
static void do_become(words w) { become(w[0]); }

static const struct {
    const char *name;
    int words;
    void (*take)(words);
} steps[] = {
    {"new", 1, do_new},             {"make", 1, do_make},           {"try", 2, do_try},
    {"write", 2, do_write},         {"mounts", 0, do_mounts},       {"translate", 2, do_translate},
    {"overlay", 3, do_overlay},     {"root", 1, do_root},           {"need", 1, do_need},
    {"folder", 2, do_folder},       {"show", 2, do_show},           {"limit", 2, do_limit},
    {"born", 3, do_born},           {"own", 1, do_own},             {"loopback", 0, do_loopback},
    {"mount", 5, do_mount},         {"bind", 3, do_bind},           {"protect", 1, do_protect},
    {"device", 2, do_device},       {"link", 2, do_link},           {"hide", 1, do_hide},
    {"freeze", 1, do_freeze},       {"enter", 1, do_enter},         {"hostname", 1, do_hostname},
    {"argument", 1, do_argument},   {"variable", 1, do_variable},   {"home", 0, do_home},
    {"become", 1, do_become},
};

/* The plan: words that each end with a zero; a step's name, then as many as it takes. */
static char *read_plan(size_t *size) {
    struct stat about;
    if (fstat(PLAN, &about)) fail("plan", "size");
    *size = (size_t)about.st_size;
    char *text = *size ? mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_PRIVATE, PLAN, 0) : MAP_FAILED;
    if (text == MAP_FAILED || text[*size - 1]) fail_because("plan", "text", "it cannot be read");
    return text;
}

int main(void) {
    size_t size;
    char *at = read_plan(&size), *end = at + size, *taken[8];
    umask(022);
    if (syscall(SYS_close_range, OWN_FROM, ~0U, 0)) fail("plan", "files");
    while (at < end) {
        size_t which = 0;
        while (which < sizeof steps / sizeof *steps && strcmp(steps[which].name, at)) which++;
        if (which == sizeof steps / sizeof *steps) fail_because("plan", at, "no such step");
        at += strlen(at) + 1;
        for (int i = 0; i < steps[which].words; i++, at += strlen(at) + 1) {
            if (at >= end) fail_because("plan", steps[which].name, "words are missing");
            taken[i] = at;
        }
        steps[which].take(taken);
    }
    fail_because("plan", "end", "nothing was started");
}
