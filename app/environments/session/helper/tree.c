/* Finding and killing processes.
 *
 * A lane is the subreaper of its command, so whoever is orphaned becomes the lane's own child: when it has no children
 * left, nobody is left. That makes a kill exact; the process table only tells whom to signal. */
#include "helper.h"

#include <dirent.h>
#include <sys/wait.h>
#include <time.h>

enum { PATIENCE_MS = 8000, MANY = 16, PIDS = 1 << 22 };

struct process {
    pid_t pid, parent, session;
    char state;
    enum { UNKNOWN, ON_THE_WAY, CHOSEN, LEFT } verdict;
};
struct table {
    struct process *rows;
    size_t count, room;
};
static struct table table;
static uint32_t row_by_pid[PIDS]; /* row + 1; only the pages of pids that exist are ever touched */

static bool look_at(const char *pid, struct process *row) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = 0;
    char *after = strrchr(text, ')'); /* the name before it may hold anything */
    if (!after) return false;
    row->pid = atoi(pid);
    return sscanf(after + 1, " %c %d %*d %d", &row->state, &row->parent, &row->session) == 3;
}

static void look(void) {
    for (size_t i = 0; i < table.count; i++) row_by_pid[table.rows[i].pid % PIDS] = 0;
    table.count = 0;
    DIR *proc = opendir("/proc");
    if (!proc) return;
    for (struct dirent *entry; (entry = readdir(proc));) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
        if (table.count == table.room) {
            size_t room = table.room ? 2 * table.room : 256;
            struct process *rows = realloc(table.rows, room * sizeof *rows);
            if (!rows) break;
            table.rows = rows;
            table.room = room;
        }
        struct process *row = table.rows + table.count;
        if (!look_at(entry->d_name, row)) continue;
        row->verdict = UNKNOWN;
        row_by_pid[row->pid % PIDS] = (uint32_t)++table.count;
    }
    closedir(proc);
}

static struct process *row_of(pid_t pid) {
    uint32_t row = pid > 0 ? row_by_pid[pid % PIDS] : 0;
    return row && row <= table.count && table.rows[row - 1].pid == pid ? table.rows + row - 1 : NULL;
}

/* Decide for everybody by the nearest ancestor for whom it was decided; without one, left. */
static void spread(void) {
    for (size_t i = 0; i < table.count; i++) {
        struct process *top = table.rows + i, *next;
        while (top->verdict == UNKNOWN && (next = row_of(top->parent))) {
            top->verdict = ON_THE_WAY; /* a cycle, which a table read over time may show, ends here */
            top = next;
        }
        int verdict = top->verdict == CHOSEN ? CHOSEN : LEFT;
        if (top->verdict == UNKNOWN) top->verdict = LEFT;
        for (struct process *p = table.rows + i; p && p->verdict == ON_THE_WAY; p = row_of(p->parent))
            p->verdict = verdict;
    }
}

bool pids_has(const struct pids *set, pid_t pid) {
    for (size_t i = 0; set && i < set->count; i++)
        if (set->pid[i] == pid) return true;
    return false;
}

static void pids_add(struct pids *set, pid_t pid) {
    if (set->count == set->room) {
        size_t room = set->room ? 2 * set->room : 64;
        pid_t *grown = realloc(set->pid, room * sizeof *grown);
        if (!grown) return;
        set->pid = grown;
        set->room = room;
    }
    set->pid[set->count++] = pid;
}

/* Choose the descendants of `root`, but not `spared` and who is below them. */
static void choose_below(pid_t root, const struct pids *spared) {
    struct process *p;
    for (size_t i = 0; spared && i < spared->count; i++)
        if ((p = row_of(spared->pid[i]))) p->verdict = LEFT;
    if ((p = row_of(root))) p->verdict = CHOSEN;
    spread();
    if (p) p->verdict = LEFT;
}

static bool alive(const struct process *p) { return p->state != 'Z' && p->state != 'X'; }

void tree_below_me(struct pids *found) {
    look();
    choose_below(getpid(), NULL);
    found->count = 0;
    for (size_t i = 0; i < table.count; i++)
        if (table.rows[i].verdict == CHOSEN && alive(table.rows + i)) pids_add(found, table.rows[i].pid);
}

bool tree_reap(pid_t main, struct ending *ending) {
    for (;;) {
        int status;
        struct rusage usage;
        pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid < 0 && errno == EINTR) continue;
        if (pid <= 0) return pid == 0;
        if (pid == main && ending) *ending = (struct ending){true, status, usage};
    }
}

static void pause_ms(int ms) {
    struct timespec time = {0, ms * 1000000L};
    nanosleep(&time, NULL);
}

static size_t chosen(void) {
    size_t count = 0;
    for (size_t i = 0; i < table.count; i++) count += table.rows[i].verdict == CHOSEN && alive(table.rows + i);
    return count;
}

/* Signal the chosen; how many heard it. One that is stopped already need not hear SIGSTOP. */
static size_t signal_chosen(int number) {
    size_t heard = 0;
    for (size_t i = 0; i < table.count; i++) {
        const struct process *p = table.rows + i;
        if (p->verdict != CHOSEN || !alive(p)) continue;
        if (number == SIGSTOP && (p->state == 'T' || p->state == 't')) continue;
        if (kill(p->pid, number) == 0) heard++;
    }
    return heard;
}

/* A round against the chosen; a tree that grows as fast as it dies is stopped as a whole before it is killed.
 * `stopping` carries over from round to round. Returns whether anybody was there. */
static bool strike(bool *stopping, int round) {
    *stopping = *stopping && chosen() > MANY && round < 200;
    size_t heard = signal_chosen(*stopping ? SIGSTOP : SIGKILL);
    if (*stopping && !heard) {
        *stopping = false;
        heard = signal_chosen(SIGKILL);
    }
    return heard > 0;
}

bool tree_kill(const struct pids *spared, pid_t main, struct ending *ending) {
    bool stopping = true;
    int64_t until = now_us() + PATIENCE_MS * 1000LL;
    for (int round = 0; now_us() < until; round++) {
        if (!tree_reap(main, ending)) return true;
        look();
        choose_below(getpid(), spared);
        if (!table.count && main > 0) kill(-main, SIGKILL); /* no /proc: what is left is the command's own group */
        if (!strike(&stopping, round) && table.count && spared && spared->count) {
            tree_reap(main, ending);
            return true;
        }
        if (round && !stopping) pause_ms(round < 10 ? 1 : 5);
    }
    return !tree_reap(main, ending);
}

void tree_kill_session(pid_t session) {
    bool stopping = true;
    for (int round = 0; round < 300; round++) {
        look();
        for (size_t i = 0; i < table.count; i++)
            if (table.rows[i].session == session) table.rows[i].verdict = CHOSEN;
        spread();
        if (!strike(&stopping, round)) return;
        if (!stopping) pause_ms(1);
    }
}

static bool is_ours(pid_t pid) {
    if (pid == main_pid) return true;
    for (int i = 0; i < MAX_LANES; i++)
        if (seats[i].lane == pid) return true;
    return false;
}

/* Choose everybody of this process table who is not of the helper. As init of a namespace that is all others; else only
 * descendants, since the rest belongs to somebody else. */
static void choose_others(void) {
    choose_below(main_pid, NULL);
    for (size_t i = 0; i < table.count; i++) {
        struct process *p = table.rows + i;
        if (main_pid == 1) p->verdict = CHOSEN;
        if (is_ours(p->pid)) p->verdict = LEFT;
    }
}

uint32_t tree_kill_all(void) {
    static unsigned char seen[PIDS / 8];
    uint32_t count = 0;
    bool stopping = true;
    memset(seen, 0, sizeof seen);
    for (int round = 0; round < 1000; round++) {
        look();
        choose_others();
        for (size_t i = 0; i < table.count; i++) {
            unsigned pid = (unsigned)table.rows[i].pid % PIDS;
            if (table.rows[i].verdict != CHOSEN || !alive(table.rows + i) || seen[pid / 8] & 1 << pid % 8) continue;
            seen[pid / 8] |= (unsigned char)(1 << pid % 8);
            count++;
        }
        if (!strike(&stopping, round)) break;
        if (!stopping) pause_ms(1);
    }
    return count;
}

uint32_t tree_count(void) {
    look();
    choose_others();
    return (uint32_t)chosen();
}
