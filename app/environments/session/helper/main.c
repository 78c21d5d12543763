/* The process that stays: init of the namespace when it is process 1, parent of the lanes, heir of what they leave. */
#include "helper.h"

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

enum { MAX_READ = 900, HANDED_OVER = 77 };

struct seat *seats, *my_seat;
pid_t main_pid;
static int control[2]; /* [0] main's, [1] every lane's: descriptors to read on; its end tells a lane that main is gone */
static int signal_fd = -1;
static struct pollfd polled[3 + MAX_READ]; /* signals, control, listener, and what is read for nobody */
static int polled_count = 3;

int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

int signals(void) { return signal_fd; }

/* Drop what the descriptor holds; true when somebody with a right to it asks us to end: the main process, or, told
 * main itself, one outside of our namespace (whom the kernel shows as 0). */
bool signals_take(void) {
    struct signalfd_siginfo info;
    bool end = false;
    while (read(signal_fd, &info, sizeof info) == sizeof info) {
        bool trusted = getpid() == main_pid ? main_pid != 1 || info.ssi_pid == 0 : info.ssi_pid == (uint32_t)main_pid;
        end |= info.ssi_signo == SIGTERM && trusted;
    }
    return end;
}

int main_pulse(void) { return control[1]; }

static void die(const char *what) {
    fprintf(stderr, "session helper: %s: %s\n", what, strerror(errno));
    exit(71);
}

/* --- A lane's side ---------------------------------------------------------------------------------------------- */

_Noreturn void lane_end(void) {
    tree_kill(NULL, 0, NULL);
    _exit(0);
}

void keep_reading(int fd) {
    struct msghdr message = {0};
    char byte = 0, space[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    sendmsg(control[1], &message, MSG_NOSIGNAL);
    close(fd);
}

void lane_hand_over(int out, int err) {
    if (out >= 0) keep_reading(out);
    if (err >= 0) keep_reading(err);
    pid_t before = getpid(), pid = fork();
    if (pid > 0) {
        my_seat->lane = pid;
        _exit(HANDED_OVER);
    }
    for (int i = 0; pid == 0 && getppid() == before && i < 500; i++) usleep(100); /* who counts processes sees one of us */
    if (pid < 0) tree_kill(NULL, 0, NULL); /* no room even for us: survivors would own this lane's next kill */
    my_seat->session = 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

/* Until a request comes: reap, and leave when the connection or the main process has gone. */
static void wait_for_request(void) {
    struct pollfd fds[3] = {{wire_in(), POLLIN, 0}, {signal_fd, POLLIN, 0}, {control[1], 0, 0}};
    while (!wire_pending()) {
        if (poll(fds, 3, -1) < 0 && errno != EINTR) lane_end();
        if (fds[2].revents || (fds[1].revents && signals_take())) lane_end();
        if (fds[1].revents) tree_reap(0, NULL);
        if (fds[0].revents) return;
    }
}

static void answer(struct frame frame) {
    switch (frame.kind) {
    case RUN: run_request(frame.size); return;
    case SHELL_OPEN: shell_open(frame.size); return;
    case STREAM_OPEN: stream_open(frame.size); return;
    case PUT: file_put(frame.size); return;
    case GET: file_get(frame.size); return;
    case PUT_TREE: tar_put(frame.size); return;
    case GET_TREE: tar_get(frame.size); return;
    case LIST: list_get(frame.size); return;
    case STATS: stats_request(); return;
    case KILL_ALL: {
        uint32_t killed = tree_kill_all();
        wire_send(OK, &killed, sizeof killed);
        return;
    }
    case PING: wire_send(OK, NULL, 0); return;
    case DATA: case END: case STOP: case RESIZE: case SIGNAL: case SHELL_CLOSE:
        wire_skip(frame.size); /* sent before the client knew that its command had ended */
        return;
    default: lane_end();
    }
}

static _Noreturn void lane_main(int in, int out) {
    my_seat->lane = getpid();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    spawn_prepare();
    int high_in = high(in);
    wire_open(high_in, in == out ? high_in : high(out));
    uint32_t hello[2] = {0x4853464d, main_pid == 1};
    wire_send(HELLO, hello, sizeof hello);
    for (;;) {
        wait_for_request();
        answer(wire_next());
    }
}

/* --- The main process ------------------------------------------------------------------------------------------- */

static int lanes(void) {
    int count = 0;
    for (int i = 0; i < MAX_LANES; i++) count += seats[i].lane != 0;
    return count;
}

static void open_lane(int in, int out) {
    for (int i = 0; i < MAX_LANES; i++) {
        if (seats[i].lane) continue;
        seats[i].session = 0;
        pid_t pid = fork();
        if (pid == 0) {
            my_seat = seats + i;
            for (int k = 1; k < polled_count; k++) close(polled[k].fd);
            lane_main(in, out);
        }
        if (pid > 0) seats[i].lane = pid;
        break;
    }
    close(in);
    if (out != in) close(out);
}

/* A lane that was killed from inside cannot have killed its command: that falls to us. One that was stopped would keep
 * its client waiting, so it is killed; whatever else was stopped is left alone: it is not ours. */
static void bury(pid_t pid, int status) {
    for (int i = 0; i < MAX_LANES; i++) {
        if (seats[i].lane != pid) continue;
        if (WIFSTOPPED(status)) {
            kill(pid, SIGKILL);
            return;
        }
        pid_t session = seats[i].session;
        seats[i].lane = 0;
        seats[i].session = 0;
        if (session && WIFSIGNALED(status)) tree_kill_session(session);
    }
}

static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;) bury(pid, status);
}

static void take_descriptor(void) {
    char byte, space[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (recvmsg(control[0], &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT) <= 0) return;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (!head || head->cmsg_type != SCM_RIGHTS) return;
    int fd;
    memcpy(&fd, CMSG_DATA(head), sizeof fd);
    if (polled_count == 3 + MAX_READ) close(fd);
    else polled[polled_count++] = (struct pollfd){fd, POLLIN, 0};
}

static void discard(int index) {
    static char nowhere[1 << 16];
    ssize_t n = read(polled[index].fd, nowhere, sizeof nowhere);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return;
    close(polled[index].fd);
    polled[index] = polled[--polled_count];
}

static void finish(bool with_everybody) {
    if (with_everybody) {
        for (int i = 0; i < MAX_LANES; i++)
            if (seats[i].lane > 0) kill(seats[i].lane, SIGTERM);
        for (int64_t until = now_us() + 3000000; lanes() && now_us() < until;) {
            struct timespec time = {0, 2000000};
            nanosleep(&time, NULL);
            reap();
        }
        tree_kill(NULL, 0, NULL);
    }
    exit(0);
}

static void serve(bool listening, double orphan_exit_s) {
    int64_t seen = now_us();
    for (;;) {
        int wait_ms = -1;
        if (lanes()) seen = now_us();
        if (listening && orphan_exit_s > 0) {
            double left_s = orphan_exit_s - (double)(now_us() - seen) / 1e6;
            if (left_s <= 0) finish(true);
            wait_ms = lanes() ? -1 : (int)(left_s * 1000) + 1;
        }
        if (!listening && !lanes()) finish(false);
        if (poll(polled, (nfds_t)polled_count, wait_ms) < 0 && errno != EINTR) finish(true);
        if (lanes()) seen = now_us(); /* until now: those that ended meanwhile are not reaped yet */
        if (polled[0].revents) {
            if (signals_take()) finish(true);
            reap();
        }
        for (int i = polled_count - 1; i >= 3; i--)
            if (polled[i].revents) discard(i);
        if (polled[1].revents) take_descriptor();
        if (listening && polled[2].revents) {
            int fd = accept4(polled[2].fd, NULL, NULL, SOCK_CLOEXEC);
            if (fd >= 0) open_lane(fd, fd);
        }
    }
}

static int listen_at(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        die(path);
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(path);
    mode_t before = umask(0177);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 128)) die(path);
    umask(before);
    return fd;
}

static void bridge(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (strlen(path) >= sizeof address.sun_path) die(path);
    strcpy(address.sun_path, path);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) die(path);
    struct pollfd fds[2] = {{0, POLLIN, 0}, {fd, POLLIN, 0}};
    static char bytes[CHUNK];
    for (;;) {
        if (poll(fds, 2, -1) < 0) continue;
        for (int i = 0; i < 2; i++) {
            if (!fds[i].revents) continue;
            ssize_t n = read(fds[i].fd, bytes, sizeof bytes);
            if (n <= 0) exit(0);
            for (ssize_t done = 0, m; done < n; done += m)
                if ((m = write(i ? 1 : fd, bytes + done, (size_t)(n - done))) <= 0) exit(0);
        }
    }
}

/* A user namespace to be taken hold of: a byte when it is there; it goes with this process. */
_Noreturn static void apart(void) {
    char byte = 0;
    if (unshare(CLONE_NEWUSER)) die("unshare");
    if (write(1, &byte, 1) == 1) while (read(0, &byte, 1) > 0) {}
    _exit(0);
}

static void prepare(void) {
    main_pid = getpid();
    size_t size = MAX_LANES * sizeof *seats;
    seats = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (seats == MAP_FAILED) die("memory");
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control)) die("socketpair");
    for (int i = 0; i < 2; i++) control[i] = high(control[i]);
    sigset_t taken;
    sigemptyset(&taken);
    sigaddset(&taken, SIGCHLD);
    sigaddset(&taken, SIGTERM);
    sigprocmask(SIG_BLOCK, &taken, NULL);
    signal_fd = high(signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    umask(022);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    polled[0] = (struct pollfd){signal_fd, POLLIN, 0};
    polled[1] = (struct pollfd){control[0], POLLIN, 0};
    polled[2] = (struct pollfd){-1, 0, 0};
}

int main(int argc, char **argv) {
    const char *path = NULL;
    int fd = -1;
    double orphan_exit_s = 0;
    bool stdio = argc == 2 && !strcmp(argv[1], "--stdio");
    signal(SIGPIPE, SIG_IGN);
    if (argc == 2 && !strcmp(argv[1], "--apart")) apart();
    /* Not traced and not read by root inside. Lanes inherit it, a command's own exec ends it. */
    prctl(PR_SET_DUMPABLE, 0);
    if (argc == 3 && !strcmp(argv[1], "--bridge")) bridge(argv[2]);
    for (int i = 1; !stdio && i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--listen")) path = argv[i + 1];
        else if (!strcmp(argv[i], "--listen-fd")) fd = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--orphan-exit")) orphan_exit_s = atof(argv[i + 1]);
    }
    if (!stdio && !path && fd < 0) {
        fprintf(stderr,
                "usage: %s --listen SOCKET | --listen-fd N [--orphan-exit SECONDS] | --stdio | --bridge SOCKET | --apart\n",
                argv[0]);
        return 64;
    }
    prepare();
    if (stdio) {
        open_lane(dup(0), dup(1));
        close(0);
        close(1);
        open("/dev/null", O_RDWR);
        dup2(0, 1);
    } else {
        polled[2] = (struct pollfd){high(path ? listen_at(path) : fd), POLLIN, 0};
        fcntl(polled[2].fd, F_SETFD, FD_CLOEXEC);
    }
    serve(!stdio, orphan_exit_s);
}
