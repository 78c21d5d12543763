"""Capabilities and privileges that a container does not get, whatever runs it."""

from __future__ import annotations

from app.models.resources import Resources

_SHARES_OF_ONE = 64
_MOST_SHARES = 512


def cpu_shares(resources: Resources) -> int:
    """A task's weight where processors are short: by what it is guaranteed, not by what it may take.

    1024 is that of an ordinary process. The programs that keep leases, the ledger and the model's answers come first:
    a worker that starved would lose its tasks.
    """
    return max(2, min(_MOST_SHARES, round(_SHARES_OF_ONE * resources.cpus)))


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
