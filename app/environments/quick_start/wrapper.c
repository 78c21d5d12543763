/* A runtime for an engine: crun, without what it need not do.
 *
 * The rules for system calls (seccomp) are compiled once, and given to crun as a filter from then on: compiling them
 * takes as long as all else that a runtime does.
 *
 * crun is executed from a sealed copy in memory. From a file it makes that copy itself, so that nobody inside can
 * overwrite it, and executes itself anew: it would be loaded twice. LIBRARIES names a folder with which it is loaded
 * sooner, as long as it keeps control groups itself and is the one that they were made for (RUNTIME_BYTES,
 * RUNTIME_CHANGED in seconds). Programs that it executes outside of the container (hooks) would be loaded like that, too,
 * so where there are any it is loaded as it is.
 *
 * On a host with both versions of cgroups at once, crun refuses to start anything. It is shown version 1 alone.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef RUNTIME
#error "RUNTIME names crun's program"
#endif
#ifndef FILTERS
#error "FILTERS names a folder for compiled filters"
#endif
#define MOST_BYTES (16 << 20)
#define UNIFIED "/sys/fs/cgroup/unified"
#define CGROUP2 0x63677270
#ifndef LIBRARIES
#define LIBRARIES ""
#endif
#ifndef RUNTIME_BYTES
#define RUNTIME_BYTES 0
#define RUNTIME_CHANGED 0
#endif
#define SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

static void hide_unified(void) {
    struct statfs found;
    if (statfs(UNIFIED, &found) || found.f_type != CGROUP2) return;
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) || umount2(UNIFIED, MNT_DETACH))
        perror("cannot hide " UNIFIED);
}

/* Where the value that begins at `at` (an object or a list) ends; NULL: nowhere. */
static char *after(char *at) {
    int depth = 0;
    for (bool quoted = false; *at; at++) {
        if (quoted) {
            if (*at == '\\' && at[1]) at++;
            else if (*at == '"') quoted = false;
        } else if (*at == '"') quoted = true;
        else if (*at == '{' || *at == '[') depth++;
        else if ((*at == '}' || *at == ']') && --depth == 0) return at + 1;
    }
    return NULL;
}

/* A member of a configuration by its name, which comes with quotes, colon and bracket; `end` is behind it. No string
 * can hold such a name: there each quote is behind a backslash. */
static char *member(char *text, const char *name, char **end) {
    char *begin = strstr(text, name);
    *end = begin ? after(begin + strlen(name) - 1) : NULL;
    return *end ? begin : NULL;
}

static void take_out(char *text, char *begin, char *end) {
    if (*end == ',') end++;
    else if (begin > text && begin[-1] == ',') begin--;
    memmove(begin, end, strlen(end) + 1);
}

static char *content_of(const char *path, size_t *size) {
    struct stat about;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return NULL;
    char *text = NULL;
    if (!fstat(file, &about) && about.st_size < MOST_BYTES && (text = malloc((size_t)about.st_size + 1))) {
        ssize_t got = read(file, text, (size_t)about.st_size);
        *size = got < 0 ? 0 : (size_t)got;
        text[*size] = 0;
    }
    close(file);
    return text;
}

static bool write_all(const char *path, const char *text) {
    size_t size = strlen(text);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return false;
    bool done = write(file, text, size) == (ssize_t)size;
    return !close(file) && done;
}

static char *joined(const char *const parts[]) {
    size_t size = 1;
    for (int i = 0; parts[i]; i++) size += strlen(parts[i]);
    char *text = calloc(1, size), *at = text;
    for (int i = 0; text && parts[i]; i++) at = stpcpy(at, parts[i]);
    return text;
}

static char *base64(const unsigned char *data, size_t size) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *text = malloc((size + 2) / 3 * 4 + 1), *at = text;
    for (size_t i = 0; text && i < size; i += 3) {
        uint32_t three = (uint32_t)data[i] << 16;
        if (i + 1 < size) three |= (uint32_t)data[i + 1] << 8;
        if (i + 2 < size) three |= data[i + 2];
        *at++ = digits[three >> 18];
        *at++ = digits[three >> 12 & 63];
        *at++ = i + 1 < size ? digits[three >> 6 & 63] : '=';
        *at++ = i + 2 < size ? digits[three & 63] : '=';
    }
    if (text) *at = 0;
    return text;
}

/* --- Filters -------------------------------------------------------------------------------------------------------
 *
 * A file for each set of rules: the filter on the first line, the rules below it, by which it is known. */

static char *filter_file(const char *rules) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *rules; rules++) hash = (hash ^ (unsigned char)*rules) * 0x100000001b3u;
    char *path = NULL;
    return asprintf(&path, "%s/%016lx", FILTERS, (unsigned long)hash) < 0 ? NULL : path;
}

static char *kept_filter(const char *rules) {
    size_t size;
    char *path = filter_file(rules), *text = path ? content_of(path, &size) : NULL;
    free(path);
    char *line = text ? strchr(text, '\n') : NULL;
    if (!line || strcmp(line + 1, rules)) return NULL;
    *line = 0;
    return text;
}

/* Keep what crun compiled for the container that it has just created. */
static void keep_filter(const char *rules, const char *state, const char *id) {
    size_t size = 0;
    char *from = joined((const char *[]){state, "/", id, "/seccomp.bpf", NULL});
    char *filter = from ? content_of(from, &size) : NULL;
    char *path = filter_file(rules), *fresh = NULL;
    if (!filter || !size || !path || asprintf(&fresh, "%s.%d", path, (int)getpid()) < 0) return;
    char *text = joined((const char *[]){base64((unsigned char *)filter, size), "\n", rules, NULL});
    mkdir(FILTERS, 0700);
    if (!text || !write_all(fresh, text) || rename(fresh, path)) unlink(fresh);
}

/* The configuration with the compiled filter in the place of the rules. */
static char *with_filter(char *text, char *begin, char *end, const char *filter) {
    static const char name[] = "\"annotations\":{", ours[] = "\"run.oci.seccomp_bpf_data\":\"";
    char *rest, *there;
    take_out(text, begin, end);
    if ((there = member(text, name, &rest))) {
        char *value = there + strlen(name), first = *value;
        *value = 0;
        char *front = joined((const char *[]){text, ours, filter, first == '}' ? "\"" : "\",", NULL});
        *value = first;
        return front ? joined((const char *[]){front, value, NULL}) : NULL;
    }
    return joined((const char *[]){"{", name, ours, filter, "\"},", text + 1, NULL});
}

/* Make the bundle's configuration ours. The rules that still have to be compiled, or NULL. */
static char *prepare(const char *bundle) {
    size_t size;
    char *path = joined((const char *[]){bundle, "/config.json", NULL});
    char *text = path ? content_of(path, &size) : NULL;
    if (!text || *text != '{') return NULL;
    char *end, *begin = member(text, "\"seccomp\":{", &end);
    char *rules = begin ? strndup(begin, (size_t)(end - begin)) : NULL;
    char *filter = rules ? kept_filter(rules) : NULL;
    if (!filter || !(text = with_filter(text, begin, end, filter))) return rules;
    if (!write_all(path, text)) {
        perror(path);
        exit(1);
    }
    return NULL;
}

/* A sealed copy of the runtime in memory; negative: none could be made. */
static int sealed(void) {
    struct stat about;
    int file = open(RUNTIME, O_RDONLY | O_CLOEXEC), copy = memfd_create("crun", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool whole = file >= 0 && copy >= 0 && !fstat(file, &about);
    for (off_t at = 0; whole && at < about.st_size;) whole = sendfile(copy, file, &at, (size_t)(about.st_size - at)) > 0;
    whole = whole && !fcntl(copy, F_ADD_SEALS, SEALS);
    if (file >= 0) close(file);
    if (!whole && copy >= 0) close(copy);
    return whole ? copy : -1;
}

/* Whether a container's configuration is there and asks for no hooks. */
static bool without_hooks(const char *folder, const char *name) {
    size_t size;
    char *path = joined((const char *[]){folder, "/", name, "/config.json", NULL});
    char *text = path ? content_of(path, &size) : NULL;
    bool found = text && !strstr(text, "\"hooks\":");
    free(path);
    free(text);
    return found;
}

/* Whether crun itself keeps the control groups of what it has created: whoever deletes does not say. */
static bool keeps_groups(const char *folder, const char *name) {
    static const char key[] = "\"systemd-cgroup\"";
    size_t size;
    char *path = joined((const char *[]){folder, "/", name, "/status", NULL});
    char *text = path ? content_of(path, &size) : NULL;
    char *at = text ? strstr(text, key) : NULL;
    if (at) at += strlen(key);
    bool found = at && !strncmp(at + strspn(at, " \t\n:"), "false", 5);
    free(path);
    free(text);
    return found;
}

/* What crun creates is described in its bundle; what it has created, below its state, by the last word. */
static bool light(char **argv, const char *state, const char *bundle) {
    struct stat about;
    bool creates = false, starts = false, deletes = false, systemd = false;
    char **word = argv + 1;
    for (; *word; word++) {
        creates |= !strcmp(*word, "create");
        starts |= !strcmp(*word, "start");
        deletes |= !strcmp(*word, "delete");
        systemd |= !strcmp(*word, "--systemd-cgroup");
    }
    if (systemd || stat(RUNTIME, &about) || about.st_size != RUNTIME_BYTES || about.st_mtime != RUNTIME_CHANGED)
        return false;
    if (creates) return bundle && without_hooks(bundle, ".");
    if (!(starts || deletes) || !state || !without_hooks(state, word[-1])) return false;
    return starts || keeps_groups(state, word[-1]);
}

/* The first word that is neither an option of crun's own nor an option's value. */
static char **command_of(char **word) {
    static const char *const valued[] = {"--root", "--log", "--log-format"};
    for (; *word && !strncmp(*word, "--", 2); word++)
        for (size_t i = 0; word[1] && i < sizeof valued / sizeof *valued; i++)
            if (!strcmp(*word, valued[i])) {
                word++;
                break;
            }
    return word;
}

/* An engine deletes once more, to be sure; crun would find that there is nothing, which takes as long as to delete.
 * Only in the words of an engine: others may mean more. */
static bool is_gone(int argc, char **argv, const char *state) {
    char **command = command_of(argv + 1);
    if (!state || command != argv + argc - 3 || strcmp(command[0], "delete") || strcmp(command[1], "--force"))
        return false;
    char *place = joined((const char *[]){state, "/", command[2], NULL});
    bool gone = place && access(place, F_OK) && errno == ENOENT && !access(state, F_OK);
    free(place);
    return gone;
}

static int run(char **argv, const char *state, const char *bundle) {
    static const char libraries[] = LIBRARIES;
    if (*libraries && light(argv, state, bundle)) setenv("LD_LIBRARY_PATH", libraries, 1);
    int copy = sealed();
    if (copy >= 0) fexecve(copy, argv, environ);
    execv(RUNTIME, argv);
    perror(RUNTIME);
    return 127;
}

int main(int argc, char **argv) {
    const char *bundle = NULL, *state = NULL;
    bool creates = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "create")) creates = true;
        else if (i + 1 < argc && !strcmp(argv[i], "--bundle")) bundle = argv[++i];
        else if (i + 1 < argc && !strcmp(argv[i], "--root")) state = argv[++i];
    }
    if (is_gone(argc, argv, state)) return 0;
    char *rules = creates && bundle ? prepare(bundle) : NULL;
    hide_unified();
    if (!rules || !state) return run(argv, state, bundle);
    pid_t child = fork();
    if (child < 0) return run(argv, state, bundle);
    if (child == 0) exit(run(argv, state, bundle));
    int status;
    if (waitpid(child, &status, 0) < 0 || !WIFEXITED(status)) return 1;
    if (WEXITSTATUS(status) == 0) keep_filter(rules, state, argv[argc - 1]);
    return WEXITSTATUS(status);
}
