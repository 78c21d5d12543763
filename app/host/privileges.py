"""Capabilities and privileges that a container does not get, whatever runs it."""

from __future__ import annotations

CPU_SHARES = 128
"""Its weight where processors are short; 1024 is that of an ordinary process. The programs that
keep leases, the ledger and the model's answers come first: a worker that starved would lose its tasks."""

CAP_DROP = [
    "AUDIT_WRITE",  # writes to the host's audit log
    "MKNOD",  # device files
    "NET_BIND_SERVICE",  # ports below 1024 need no privilege inside: see the sysctl
    "NET_RAW",  # forged packets on a shared bridge
    "SETFCAP",  # privileges on files, which would outlive the process
    "SETPCAP",
    "SYS_CHROOT",
]
"""Taken from the engine's default set. What is left (CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETUID, SETGID) is what
root needs to install packages, change owners and run tests as another user."""
