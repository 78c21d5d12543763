"""Builds the runtime's config.json, hardened as Docker's engine does it."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.environments.isolation.spawning import LISTENING
from app.environments.isolation.users import SIZE
from app.environments.runtimes.oci.system_layer import HELPER, HOSTNAME
from app.host.privileges import CAP_DROP

ENGINE_CAPABILITIES = [
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
]
"""What Docker's engine gives a container that asks for nothing."""
CAPABILITY_BITS = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
}
"""The kernel's numbers of those that are left."""
CAPABILITIES = [f"CAP_{name}" for name in ENGINE_CAPABILITIES if name not in CAP_DROP]

ORPHAN_S = 60.0
"""How long after its last connection an environment ends itself: its owner was killed."""

SCRATCH_BYTES = 256 << 20
"""Of each folder in memory that a read-only environment has."""

_LIMITS = {"RLIMIT_NOFILE": 1 << 20, "RLIMIT_CORE": 0}
"""As an engine's for open files; none for core dumps, which would fill disks and start a program of the host."""

MASKED = [
    *(f"/proc/{name}" for name in ("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug")),
    *(f"/proc/{name}" for name in ("scsi", "timer_list", "timer_stats")),
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
]
"""Files of the kernel that are hidden inside."""
READ_ONLY = [f"/proc/{name}" for name in ("bus", "fs", "irq", "sys", "sysrq-trigger")]
SYSCTLS = {"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": f"0 {SIZE - 1}"}
OOM_SCORE = 500
"""A host short of memory ends a task before a worker."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("mount", "network", "uts", "pid", "ipc")


@dataclass(frozen=True)
class ConfigOptions:
    """One environment, as a runtime must know it."""

    root: Path  # where its file system will be mounted
    env: Mapping[str, str]  # the image's, then the task's
    cgroup_mounts: list[dict[str, Any]]
    annotations: Mapping[str, str]
    seccomp: Mapping[str, Any] | None  # None: the runtime was given the compiled filter
    read_only: bool = False  # but for folders in memory
    users: int | None = None  # by which number of this host those inside begin; None: by its own


def configuration(plan: ConfigOptions) -> dict[str, Any]:
    """config.json for `plan`. No limits: the cgroup that it is born in has them."""
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in _NAMESPACES],
        "maskedPaths": MASKED,
        "readonlyPaths": READ_ONLY,
        "sysctl": SYSCTLS,
    }
    if plan.users is not None:
        linux["namespaces"].insert(0, {"type": "user"})
        numbers = [{"containerID": 0, "hostID": plan.users, "size": SIZE}]
        linux |= {"uidMappings": numbers, "gidMappings": numbers}
    if plan.seccomp is not None:
        linux["seccomp"] = dict(plan.seccomp)
    return {
        "ociVersion": "1.0.2",
        "process": _process(plan),
        "root": {"path": str(plan.root), "readonly": plan.read_only},
        "hostname": HOSTNAME,
        "mounts": [*mounts(read_only=plan.read_only), *plan.cgroup_mounts],
        "annotations": dict(plan.annotations),
        "linux": linux,
    }


def _process(plan: ConfigOptions) -> dict[str, Any]:
    return {
        "user": {"uid": 0, "gid": 0, "additionalGids": [0]},
        "args": command(),
        "env": variables(plan.env),
        "cwd": "/",
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
        "rlimits": [{"type": name, "hard": value, "soft": value} for name, value in limits().items()],
        "noNewPrivileges": True,
        "oomScoreAdj": OOM_SCORE,
    }


def command() -> list[str]:
    """The first process: the session's helper."""
    return [f"/{HELPER}", "--listen-fd", str(LISTENING), "--orphan-exit", f"{ORPHAN_S:.0f}"]


def variables(env: Mapping[str, str]) -> list[str]:
    """`NAME=value` of the first process: what every environment has, then `env`."""
    return [f"{name}={value}" for name, value in {"PATH": _PATH, "HOSTNAME": HOSTNAME, **env}.items()]


def limits() -> dict[str, int]:
    """By the names of `resource`; at most what this process may have: no runtime can raise it everywhere."""
    found = {}
    for name, wanted in _LIMITS.items():
        _, hard = resource.getrlimit(getattr(resource, name))
        found[name] = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    return found


def mounts(*, read_only: bool) -> list[dict[str, Any]]:
    """As in config.json, in their order, but for the control groups, which come last."""
    return [*_MOUNTS, *(_scratch() if read_only else ())]


def _mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


_CLOSED = ("nosuid", "noexec", "nodev")
_MOUNTS = [
    _mount("/proc", "proc", "proc", *_CLOSED),
    _mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=64k"),
    _mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
    _mount("/dev/mqueue", "mqueue", "mqueue", *_CLOSED),
    _mount("/dev/shm", "tmpfs", "shm", *_CLOSED, "mode=1777", "size=64m"),
    _mount("/sys", "sysfs", "sysfs", *_CLOSED, "ro"),
]


def _scratch() -> list[dict[str, Any]]:
    """What even programs that write nothing need; it counts as memory of the environment."""
    size = f"size={SCRATCH_BYTES}"
    shared = [_mount(place, "tmpfs", "tmpfs", "nosuid", "nodev", "mode=1777", size) for place in ("/tmp", "/var/tmp")]
    return [*shared, _mount("/run", "tmpfs", "tmpfs", "nosuid", "nodev", "mode=755", size)]
