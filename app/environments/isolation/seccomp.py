"""System calls that an environment may make, the same as in Docker's default profile.

Two differences, both on the safe side and both from newer engines: no io_uring, no sockets of the hypervisor. Newer
kernel calls that give no power beyond the file or memory at hand are added, since programs do not expect that the
C library's choice is refused.

Source: the default profile of Docker's engine (moby, Apache-2.0), taken as the engine writes it for our capabilities.
"""

from __future__ import annotations

from typing import Any

_ALLOWED = """
_llseek _newselect accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod
chown chown32 clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64
clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve
execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat
fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr
fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue futex_time64 futex_wait
futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid getegid32
geteuid geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp getpid getppid
getpriority getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt
gettid gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init inotify_init1
inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit ioctl
ioprio_get ioprio_set ipc kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lchown32
lgetxattr link linkat listen listmount listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat lstat64
madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2
mlockall mmap mmap2 modify_ldt mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64
mq_timedsend mq_timedsend_time64 mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap
nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease process_vm_readv
process_vm_writev pselect6 pselect6_time64 ptrace pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename renameat renameat2
restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list set_thread_area
set_tid_address setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid
setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid
setsockopt setuid setuid32 setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4
sigprocmask sigreturn socketcall socketpair splice stat stat64 statfs statfs64 statmount statx symlink symlinkat
sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime
timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat utime utimensat
utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev
"""

_ARM = "arm_fadvise64_64 arm_sync_file_range breakpoint cacheflush set_tls sync_file_range2"

_PERSONALITIES = (0x0, 0x0008, 0x20000, 0x20008, 0xFFFFFFFF)
"""Plain, 16-bit user ids, UNAME26, both, and a query of the current value."""
_CLONE_NAMESPACES = 0x7E020000
_AF_VSOCK = 40
_ENOSYS = 38

_ARCHITECTURES = {
    "amd64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "arm64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}


def profile(machine: str) -> dict[str, Any]:
    """Builds the section `linux.seccomp` of a specification for a machine (`amd64`, `arm64`)."""
    names = _ALLOWED.split() + (_ARM.split() if machine == "arm64" else [])
    rules = [
        _allow(names),
        _allow(["socket"], {"index": 0, "value": _AF_VSOCK, "op": "SCMP_CMP_NE"}),
        *(_allow(["personality"], {"index": 0, "value": value, "op": "SCMP_CMP_EQ"}) for value in _PERSONALITIES),
        # No new namespaces: `clone` only without their flags. Libraries fall back to it when `clone3` is unknown.
        _allow(["clone"], {"index": 0, "value": _CLONE_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}),
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
    ]
    section: dict[str, Any] = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": rules}
    if machine in _ARCHITECTURES:
        section["architectures"] = _ARCHITECTURES[machine]
    return section


def _allow(names: list[str], argument: dict[str, Any] | None = None) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ALLOW"}
    return rule if argument is None else {**rule, "args": [argument]}
