"""Defines CPU weights, and the capabilities that no container gets, whatever runs it."""

from __future__ import annotations

from app.models.resources import Resources

_SHARES_OF_ONE = 64
_MOST_SHARES = 512


def cpu_shares(resources: Resources) -> int:
    """Returns a task's CPU weight under contention: by its guaranteed CPUs, not by its maximum.

    An ordinary process has 1024. Programs that renew leases, the ledger and the model services have priority: a worker
    without CPU time would lose its tasks.
    """
    return max(2, min(_MOST_SHARES, round(_SHARES_OF_ONE * resources.cpus)))


CAP_DROP = [
    "AUDIT_WRITE",  # writes to the host's audit log
    "MKNOD",  # device files
    "NET_BIND_SERVICE",  # ports below 1024 need no privilege inside: see the sysctl
    "NET_RAW",  # forged packets on a shared bridge
    "SETFCAP",  # file capabilities, which would outlive the process
    "SETPCAP",
    "SYS_CHROOT",
]
"""Removed from the engine's default set. The rest (CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETUID, SETGID) is what
root needs to install packages, change owners and run tests as another user."""
