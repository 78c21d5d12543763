/* What the environment's first process, and so everybody in it, gives up. */
#include "launcher.h"

#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>

void limit(int which, const char *value) {
    uint64_t wanted = strtoull(value, NULL, 10), both[2] = {wanted, wanted};
    if (syscall(SYS_prlimit64, 0, which, both, NULL)) fail("limit", value);
}

void loopback(void) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq one = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &one)) fail("loopback", "lo");
    close(fd);
}

static void drop_capabilities(uint64_t kept) {
    for (int bit = 0; bit < 64; bit++) {
        if (kept >> bit & 1) continue;
        if (prctl(PR_CAPBSET_DROP, bit, 0, 0, 0)) {
            if (errno == EINVAL) break; /* the kernel's last one was before */
            fail("confine", "bounding set");
        }
    }
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2] = {
        {(uint32_t)kept, (uint32_t)kept, 0},
        {(uint32_t)(kept >> 32), (uint32_t)(kept >> 32), 0},
    };
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)) fail("confine", "ambient set");
    if (syscall(SYS_capset, &head, sets)) fail("confine", "capabilities");
}

/* The filter, compiled, as it lies in its file; the last step, since it forbids what comes before. */
static void filter_calls(void) {
    struct stat about;
    static struct sock_filter rules[BPF_MAXINSNS];
    if (fstat(FILTER, &about)) fail("confine", "filter");
    size_t size = (size_t)about.st_size;
    if (!size || size % sizeof *rules || size > sizeof rules) fail_because("confine", "filter", "it is no filter");
    if (pread(FILTER, rules, size, 0) != (ssize_t)size) fail("confine", "filter");
    struct sock_fprog program = {(unsigned short)(size / sizeof *rules), rules};
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program))
        fail("confine", "filter");
}

void confine(uint64_t kept) {
    drop_capabilities(kept);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("confine", "new privileges");
    filter_calls();
}
