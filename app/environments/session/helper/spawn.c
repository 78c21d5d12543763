/* Starting a program: environment, user, folder, descriptors. vfork, so that the cost is the program's own. */
#include "helper.h"

#include <grp.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

extern char **environ;

static int devnull = -1;
static char worse_score[16];

void spawn_prepare(void) {
    devnull = high(open("/dev/null", O_RDWR | O_CLOEXEC));
    /* Out of memory, the kernel shall take a command before the helper. Everybody may raise the own score. */
    int fd = open("/proc/self/oom_score_adj", O_RDONLY | O_CLOEXEC);
    char text[16] = "";
    if (fd >= 0 && read(fd, text, sizeof text - 1) > 0) {
        int score = atoi(text) + 100;
        snprintf(worse_score, sizeof worse_score, "%d", score > 1000 ? 1000 : score);
    }
    if (fd >= 0) close(fd);
}

int high(int fd) {
    if (fd < 0 || fd >= 20) return fd;
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, 20);
    close(fd);
    return moved;
}

int null_input(void) {
    if (devnull >= 0) return fcntl(devnull, F_DUPFD_CLOEXEC, 20);
    int ends[2]; /* no /dev/null in this image: a pipe that has ended reads the same */
    if (pipe2(ends, O_CLOEXEC)) return -1;
    close(ends[1]);
    return high(ends[0]);
}

int script_of(struct text script) {
    int fd = high(memfd_create("command", MFD_CLOEXEC));
    for (uint32_t done = 0; fd >= 0 && done < script.size;) {
        ssize_t n = pwrite(fd, script.bytes + done, script.size - done, done);
        if (n <= 0) {
            close(fd);
            return -1;
        }
        done += (uint32_t)n;
    }
    return fd;
}

/* --- Users: /etc/passwd and /etc/group read by hand, since a static program has no name service ------------------ */

struct who {
    bool given;
    uid_t uid;
    gid_t gid;
    gid_t groups[64];
    int group_count;
    char name[256], home[1024];
};

static bool number_of(const char *text, unsigned *number) {
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (!*text || *end || value > 0xfffffffeUL) return false;
    *number = (unsigned)value;
    return true;
}

/* The next line's fields, cut at ':'. */
static bool fields_of(FILE *file, char *line, int room, char **fields, int count) {
    if (!fgets(line, room, file)) return false;
    line[strcspn(line, "\n")] = 0;
    for (int i = 0; i < count; i++) fields[i] = line ? strsep(&line, ":") : "";
    return true;
}

static bool user_of(const char *name, bool by_name, struct who *who) {
    FILE *file = fopen("/etc/passwd", "re");
    char line[4096], *f[6];
    bool found = false;
    while (file && !found && fields_of(file, line, sizeof line, f, 6)) {
        unsigned uid, gid;
        if (!f[2] || !f[3] || !number_of(f[2], &uid) || !number_of(f[3], &gid)) continue;
        found = by_name ? !strcmp(f[0], name) : uid == who->uid;
        if (!found) continue;
        who->uid = uid;
        who->gid = gid;
        snprintf(who->name, sizeof who->name, "%s", f[0]);
        snprintf(who->home, sizeof who->home, "%s", f[5] ? f[5] : "");
    }
    if (file) fclose(file);
    return found;
}

static bool lists(char *members, const char *name) {
    for (char *one; members && (one = strsep(&members, ","));)
        if (!strcmp(one, name)) return true;
    return false;
}

/* With `name`, that group's id; else the groups which list the user. */
static bool groups_of(const char *name, struct who *who) {
    FILE *file = fopen("/etc/group", "re");
    char line[8192], *f[4];
    bool found = false;
    while (file && fields_of(file, line, sizeof line, f, 4)) {
        unsigned gid;
        if (!f[2] || !number_of(f[2], &gid)) continue;
        if (name && !strcmp(f[0], name)) {
            who->gid = gid;
            found = true;
        } else if (!name && who->name[0] && lists(f[3], who->name) && who->group_count < 63) {
            who->groups[who->group_count++] = gid;
        }
    }
    if (file) fclose(file);
    return found;
}

static bool who_is(const char *user, struct who *who) {
    char name[512];
    snprintf(name, sizeof name, "%s", user);
    char *group = strchr(name, ':');
    if (group) *group++ = 0;
    unsigned number;
    *who = (struct who){.given = true};
    if (!user_of(name, true, who)) {
        if (!number_of(name, &number)) return false;
        who->uid = number;
        user_of(name, false, who);
    }
    groups_of(NULL, who);
    if (group && *group && !groups_of(group, who)) {
        if (!number_of(group, &number)) return false;
        who->gid = number;
    }
    who->groups[who->group_count++] = who->gid;
    return true;
}

/* --- The environment -------------------------------------------------------------------------------------------- */

static bool same_name(const char *a, const char *b) {
    for (; *a && *a == *b; a++, b++)
        if (*a == '=') return true;
    return false;
}

static void set(char **list, size_t *count, char *entry) {
    for (size_t i = 0; i < *count; i++)
        if (same_name(list[i], entry)) {
            list[i] = entry;
            return;
        }
    list[(*count)++] = entry;
}

static char *value_of(char **list, const char *name_and_equals) {
    size_t n = strlen(name_and_equals);
    for (; *list; list++)
        if (!strncmp(*list, name_and_equals, n)) return *list + n;
    return NULL;
}

/* The helper's own variables, overridden by the request's; HOME and PATH there in any case. */
static char **environment_of(const struct spawn *s, struct who *who) {
    static char home[1100];
    size_t own = 0, added = 0, count = 0;
    while (environ[own]) own++;
    while (s->env[added]) added++;
    char **list = calloc(own + added + 4, sizeof *list);
    if (!list) lane_end();
    for (size_t i = 0; !s->clear_env && i < own; i++) list[count++] = environ[i];
    if (!value_of(list, "PATH=")) list[count++] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    if (who->given || !value_of(list, "HOME=")) {
        if (!who->given) {
            who->uid = geteuid();
            user_of("", false, who);
        }
        snprintf(home, sizeof home, "HOME=%s", who->home[0] ? who->home : "/");
        set(list, &count, home);
    }
    for (size_t i = 0; i < added; i++)
        if (strchr(s->env[i], '=')) set(list, &count, s->env[i]);
    return list;
}

/* --- The start -------------------------------------------------------------------------------------------------- */

struct child { /* shared with the vforked child, which writes what went wrong */
    const struct spawn *spawn;
    const struct who *who;
    char **env;
    const char *path;
    volatile int number;
    volatile char step;
};

static void try_exec(struct child *c, const char *file) {
    execve(file, c->spawn->argv, c->env);
    if (errno == ENOEXEC) { /* a script without its first line: as every shell does */
        char *argv[64] = {"/bin/sh", (char *)file};
        for (int i = 1; i < 61 && c->spawn->argv[i]; i++) argv[i + 1] = c->spawn->argv[i];
        execve(argv[0], argv, c->env);
    }
}

static void exec_along_path(struct child *c) {
    const char *name = c->spawn->argv[0];
    if (strchr(name, '/') || !*name) {
        try_exec(c, name);
        return;
    }
    int found = ENOENT;
    for (const char *at = c->path; at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
        char file[4096];
        int n = (int)strcspn(at, ":");
        if (snprintf(file, sizeof file, "%.*s%s%s", n, at, n ? "/" : "./", name) >= (int)sizeof file) continue;
        try_exec(c, file);
        if (errno != ENOENT && errno != ENOTDIR) found = errno;
    }
    errno = found;
}

static void become(struct child *c, char step, long result) {
    if (result >= 0) return;
    c->number = errno;
    c->step = step;
    _exit(126);
}

static _Noreturn void child(struct child *c) {
    const struct spawn *s = c->spawn;
    sigset_t none;
    sigemptyset(&none);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGHUP, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    become(c, 's', setsid());
    my_seat->session = getpid(); /* before it can do anything: it may kill its lane at once */
    for (int i = 0; i < 3; i++) become(c, 'f', dup2(s->streams[i], i));
    for (int i = 0; i < s->extras; i++) become(c, 'f', dup2(s->extra[i].from, s->extra[i].to));
    if (s->terminal) become(c, 't', ioctl(0, TIOCSCTTY, 0));
    if (worse_score[0]) {
        int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
        if (fd >= 0 && write(fd, worse_score, strlen(worse_score)) < 0) errno = 0;
        if (fd >= 0) close(fd);
    }
    if (c->who->given) { /* raw calls: the library's would tell threads, of which there are none */
        become(c, 'u', syscall(SYS_setgroups, c->who->group_count, c->who->groups));
        become(c, 'u', syscall(SYS_setgid, c->who->gid));
        become(c, 'u', syscall(SYS_setuid, c->who->uid));
    }
    if (s->cwd && *s->cwd) become(c, 'd', chdir(s->cwd));
    exec_along_path(c);
    become(c, 'x', -1);
    _exit(126);
}

static void explain(struct spawn *s, const struct child *c) {
    const char *why = strerror(c->number);
    s->code = 126;
    switch (c->step) {
    case 'd': snprintf(s->problem, sizeof s->problem, "cannot enter the folder %.400s: %s\n", s->cwd, why); break;
    case 'u': snprintf(s->problem, sizeof s->problem, "cannot become user %.400s: %s\n", s->user, why); break;
    case 'x':
        snprintf(s->problem, sizeof s->problem, "cannot start %.400s: %s\n", s->argv[0], why);
        if (c->number == ENOENT) s->code = 127;
        break;
    default: snprintf(s->problem, sizeof s->problem, "cannot start a process: %s\n", why);
    }
}

static pid_t start(struct child *c) {
    pid_t pid = vfork();
    if (pid == 0) child(c);
    return pid;
}

pid_t spawn_start(struct spawn *s) {
    static struct who nobody;
    struct who who = nobody;
    s->code = 126;
    if (!s->argv[0]) {
        snprintf(s->problem, sizeof s->problem, "nothing to start\n");
        return 0;
    }
    if (s->user && *s->user && !who_is(s->user, &who)) {
        snprintf(s->problem, sizeof s->problem, "no user %.400s in this environment\n", s->user);
        return 0;
    }
    for (int i = 0; who.given && !s->terminal && i < 3; i++) fchmod(s->streams[i], 0666); /* /dev/stdout is opened anew */
    char **env = environment_of(s, &who);
    struct child c = {.spawn = s, .who = &who, .env = env, .path = value_of(env, "PATH=")};
    pid_t pid = start(&c);
    if (pid < 0) c.number = errno;
    if (pid < 0 || c.step) {
        my_seat->session = 0;
        explain(s, &c);
    }
    free(env);
    return pid > 0 && !c.step ? pid : 0; /* one that failed is reaped like any child */
}
