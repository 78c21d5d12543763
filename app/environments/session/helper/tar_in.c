/* A tar into a folder: ustar, GNU long names, pax; files, folders and links. The image need not have a tar.
 *
 * Names are resolved without looking, and may lead neither out of the folder nor through a link of the same archive. */
#include "helper.h"

#include <stdarg.h>
#include <sys/stat.h>
#include <time.h>

enum { BLOCK = 512, LONGEST = 1 << 16 };

struct member {
    char name[4096], link[4096];
    unsigned char type;
    uint64_t size;
    mode_t mode;
    int64_t time;
};
struct folder { /* its mode and time are set when everything is in it */
    char *name;
    mode_t mode;
    int64_t time;
};
static int root;
static char problem[800];
static int problem_number;
static struct folder *folders;
static size_t folder_count, folder_room;
static uint64_t *links; /* hashes of the names of links that this archive made */
static size_t link_count, link_room;

static bool refuse(int number, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(problem, sizeof problem, format, values);
    va_end(values);
    problem_number = number;
    return false;
}

static bool read_exactly(unsigned char *to, size_t size) {
    for (unsigned char *piece; size;) {
        size_t n = body_some(&piece, size);
        if (!n) return refuse(0, "the tar archive is cut off.");
        if (to) {
            memcpy(to, piece, n);
            to += n;
        }
        size -= n;
    }
    return true;
}

/* --- Headers ---------------------------------------------------------------------------------------------------- */

static uint64_t number_in(const unsigned char *at, size_t size) {
    uint64_t value = 0;
    if (at[0] & 0x80) {
        for (size_t i = 1; i < size; i++) value = value << 8 | at[i];
        return value;
    }
    for (size_t i = 0; i < size; i++)
        if (at[i] >= '0' && at[i] <= '7') value = value << 3 | (uint64_t)(at[i] - '0');
    return value;
}

static bool sound(const unsigned char *block) {
    uint64_t sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += i >= 148 && i < 156 ? ' ' : block[i];
    return sum == number_in(block + 148, 8);
}

static bool copy_field(char *to, const void *from, size_t size) {
    size_t n = strnlen(from, size);
    if (n >= 4096) return refuse(0, "a name in the tar archive is longer than a path may be.");
    memcpy(to, from, n);
    to[n] = 0;
    return true;
}

/* The content of a header that only describes the next one. */
static unsigned char *long_field(uint64_t size) {
    static unsigned char content[LONGEST + BLOCK];
    if (size > LONGEST) return refuse(0, "a header of the tar archive is too long."), NULL;
    size_t padded = ((size_t)size + BLOCK - 1) / BLOCK * BLOCK;
    if (!read_exactly(content, padded)) return NULL;
    content[size] = 0;
    return content;
}

/* Records "LENGTH key=value\n". */
static bool take_pax(char *at, size_t size, struct member *m, bool *has_size) {
    for (char *end = at + size; at < end;) {
        char *after;
        unsigned long length = strtoul(at, &after, 10);
        if (*after != ' ' || length < 5 || length > (size_t)(end - at)) return refuse(0, "a broken header in the tar.");
        char *key = after + 1, *stop = at + length - 1;
        char *equals = key < stop ? memchr(key, '=', (size_t)(stop - key)) : NULL;
        if (!equals) return refuse(0, "a broken header in the tar archive.");
        *equals = *stop = 0;
        char *value = equals + 1;
        if (!strcmp(key, "path") && !copy_field(m->name, value, (size_t)(stop - value) + 1)) return false;
        if (!strcmp(key, "linkpath") && !copy_field(m->link, value, (size_t)(stop - value) + 1)) return false;
        if (!strcmp(key, "mtime")) m->time = atoll(value);
        if (!strcmp(key, "size")) {
            m->size = strtoull(value, NULL, 10);
            *has_size = true;
        }
        if (!strncmp(key, "GNU.sparse", 10)) return refuse(0, "the tar archive holds a sparse file.");
        at += length;
    }
    return true;
}

/* 1: a member, 0: the end, -1: refused. */
static int next_member(struct member *m) {
    unsigned char block[BLOCK];
    bool has_size = false, started = false;
    *m = (struct member){.time = -1};
    for (;;) {
        if (!read_exactly(block, BLOCK)) return -1;
        bool empty = true;
        for (int i = 0; i < BLOCK && empty; i++) empty = !block[i];
        if (empty && !started) return 0;
        if (!sound(block)) return refuse(0, "expected an uncompressed tar, found something else."), -1;
        started = true;
        uint64_t size = number_in(block + 124, 12);
        unsigned char type = block[156], *content;
        if (type == 'L' || type == 'K') {
            if (!(content = long_field(size)) || !copy_field(type == 'L' ? m->name : m->link, content, (size_t)size + 1))
                return -1;
            continue;
        }
        if (type == 'x' || type == 'g') {
            if (!(content = long_field(size))) return -1;
            if (type == 'x' && !take_pax((char *)content, (size_t)size, m, &has_size)) return -1;
            continue;
        }
        char whole[300];
        bool split = !memcmp(block + 257, "ustar\0", 6) && block[345];
        snprintf(whole, sizeof whole, split ? "%.155s/%.100s" : "%.0s%.100s", block + 345, block);
        if (!m->name[0]) copy_field(m->name, whole, sizeof whole);
        if (!m->link[0]) copy_field(m->link, block + 157, 100);
        if (!has_size) m->size = size;
        if (m->time < 0) m->time = (int64_t)number_in(block + 136, 12);
        m->type = type ? type : '0';
        m->mode = (mode_t)number_in(block + 100, 8) & 0777; /* no set-uid from an archive */
        size_t n = strlen(m->name);
        if (m->type == '0' && n && m->name[n - 1] == '/') m->type = '5';
        return 1;
    }
}

/* --- Names ------------------------------------------------------------------------------------------------------ */

/* Without dots, doubled and leading slashes; false: it leads outside. */
static bool straighten(char *name) {
    char clean[4096];
    size_t n = 0;
    for (char *part, *rest = name; (part = strsep(&rest, "/"));) {
        if (!*part || !strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) {
            if (!n) return false;
            while (n && clean[--n] != '/') {}
            continue;
        }
        if (n) clean[n++] = '/';
        memcpy(clean + n, part, strlen(part));
        n += strlen(part);
    }
    clean[n] = 0;
    memcpy(name, clean, n + 1);
    return true;
}

static uint64_t hash_of(const char *text, size_t size) {
    uint64_t hash = 1469598103934665603ULL;
    for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)text[i]) * 1099511628211ULL;
    return hash ? hash : 1;
}

static size_t place_of(uint64_t hash) {
    size_t i = (size_t)hash & (link_room - 1);
    while (links[i] && links[i] != hash) i = (i + 1) & (link_room - 1);
    return i;
}

static void remember_link(uint64_t hash) {
    if (2 * link_count >= link_room) {
        uint64_t *old = links;
        size_t count = link_room;
        link_room = link_room ? 2 * link_room : 64;
        links = calloc(link_room, sizeof *links);
        if (!links) lane_end();
        for (size_t i = 0; i < count; i++)
            if (old[i]) links[place_of(old[i])] = old[i];
        free(old);
    }
    links[place_of(hash)] = hash;
    link_count++;
}

static bool through_link(const char *name) {
    if (!link_count) return false;
    for (const char *at = strchr(name, '/'); at; at = strchr(at + 1, '/'))
        if (links[place_of(hash_of(name, (size_t)(at - name)))]) return true;
    return false;
}

/* --- Members ---------------------------------------------------------------------------------------------------- */

static bool system_refused(const char *name) {
    return refuse(errno, "%.600s: %s", name, strerror(errno));
}

static void parents(char *name) {
    for (char *at = strchr(name, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        mkdirat(root, name, 0755);
        *at = '/';
    }
}

/* What stood in the way of a file or link is removed, as every tar does; a folder is not. */
static void make_way(char *name) {
    if (unlinkat(root, name, 0) && errno == ENOENT) parents(name);
}

static bool make_file(struct member *m) {
    const int how = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(root, m->name, how, 0600);
    if (fd < 0) {
        make_way(m->name);
        fd = openat(root, m->name, how, 0600);
    }
    if (fd < 0) return system_refused(m->name);
    bool fine = true;
    unsigned char *piece;
    for (uint64_t left = m->size; fine && left;) {
        size_t n = body_some(&piece, left < CHUNK ? (size_t)left : CHUNK);
        if (!n) fine = refuse(0, "the tar archive is cut off.");
        else if (write_all(fd, piece, n)) fine = system_refused(m->name);
        left -= n;
    }
    struct timespec times[2] = {{m->time, 0}, {m->time, 0}};
    if (fine && fchmod(fd, m->mode)) fine = system_refused(m->name);
    if (fine) futimens(fd, times);
    close(fd);
    return fine && read_exactly(NULL, (BLOCK - m->size % BLOCK) % BLOCK);
}

static bool make_folder(struct member *m) {
    if (!*m->name) return true; /* the folder itself: as it is */
    struct stat about;
    if (mkdirat(root, m->name, 0700) && (errno == ENOENT || errno == ENOTDIR)) {
        make_way(m->name);
        mkdirat(root, m->name, 0700);
    }
    if (fstatat(root, m->name, &about, 0)) return system_refused(m->name);
    if (!S_ISDIR(about.st_mode)) return refuse(ENOTDIR, "%.600s: %s", m->name, strerror(ENOTDIR));
    if (folder_count == folder_room) {
        folder_room = folder_room ? 2 * folder_room : 64;
        folders = realloc(folders, folder_room * sizeof *folders);
        if (!folders) lane_end();
    }
    folders[folder_count++] = (struct folder){strdup(m->name), m->mode, m->time};
    return true;
}

static bool make_link(struct member *m) {
    bool symbolic = m->type == '2';
    for (int attempt = 0; attempt < 2; attempt++) {
        int failed = symbolic ? symlinkat(m->link, root, m->name) : linkat(root, m->link, root, m->name, 0);
        if (!failed) {
            if (symbolic) remember_link(hash_of(m->name, strlen(m->name)));
            return true;
        }
        if (!attempt) make_way(m->name);
    }
    return system_refused(m->name);
}

static bool make(struct member *m) {
    char given[4096];
    memcpy(given, m->name, sizeof given);
    if (!straighten(m->name) || (m->type == '1' && !straighten(m->link)))
        return refuse(0, "archive member '%.600s' is refused: it leads outside of its folder.", given);
    if (through_link(m->name) || (m->type == '1' && through_link(m->link)))
        return refuse(0, "archive member '%.600s' is refused: a link of the archive leads it outside.", given);
    if (!*m->name && m->type != '5') return refuse(0, "archive member '%.600s' is refused: it has no name.", given);
    switch (m->type) {
    case '0': case '7': return make_file(m);
    case '5': return make_folder(m);
    case '1': case '2': return make_link(m);
    default: return refuse(0, "archive member '%.600s' is refused: expected a file, a folder or a link.", given);
    }
}

static void finish_folders(void) {
    while (folder_count) { /* backwards: what is inside comes before the folder */
        struct folder *f = folders + --folder_count;
        struct timespec times[2] = {{f->time, 0}, {f->time, 0}};
        if (f->name && !fchmodat(root, f->name, f->mode, 0)) utimensat(root, f->name, times, 0);
        free(f->name);
    }
}

void tar_put(uint32_t size) {
    static struct member m;
    struct cursor at = {wire_payload(size), NULL, false};
    at.end = at.at + size;
    struct text path = take_text(&at);
    if (at.broken) lane_end();
    body_begin();
    problem[0] = 0;
    link_count = 0;
    if (link_room) memset(links, 0, link_room * sizeof *links);
    char folder[4200];
    snprintf(folder, sizeof folder, "%s/", path.bytes);
    make_parents(folder);
    root = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int more = root < 0 ? system_refused(path.bytes), -1 : 1;
    while (more > 0 && (more = next_member(&m)) > 0)
        if (!make(&m)) more = -1;
    body_drop();
    finish_folders();
    if (root >= 0) close(root);
    if (more < 0) wire_fail(problem_number ? OF_SYSTEM : OF_ARCHIVE, problem_number, "%s", problem);
    else wire_send(OK, NULL, 0);
}
