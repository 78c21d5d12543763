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
"""Capabilities that Docker's engine gives a container without further options."""
CAPABILITY_BITS = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
}
"""The kernel's numbers of the remaining capabilities."""
CAPABILITIES = [f"CAP_{name}" for name in ENGINE_CAPABILITIES if name not in CAP_DROP]

ORPHAN_S = 60.0
"""Seconds after its last connection until an environment ends itself: its owner was killed."""

SCRATCH_BYTES = 256 << 20
"""Size of each folder in memory of a read-only environment."""

_LIMITS = {"RLIMIT_NOFILE": 1 << 20, "RLIMIT_CORE": 0}
"""Open files as in an engine; no core dumps, which would fill disks and start a program of the host."""

MASKED = [
    *(f"/proc/{name}" for name in ("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug")),
    *(f"/proc/{name}" for name in ("scsi", "timer_list", "timer_stats")),
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
]
"""Kernel files that are hidden inside."""
READ_ONLY = [f"/proc/{name}" for name in ("bus", "fs", "irq", "sys", "sysrq-trigger")]
SYSCTLS = {"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": f"0 {SIZE - 1}"}
OOM_SCORE = 500
"""Makes a host short of memory end a task before a worker."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("user", "mount", "network", "uts", "pid", "ipc")


@dataclass(frozen=True)
class ConfigOptions:
    """Options of one environment for its runtime."""

    root: Path  # where its file system will be mounted
    env: Mapping[str, str]  # the image's, then the task's
    cgroup_mounts: list[dict[str, Any]]
    annotations: Mapping[str, str]
    seccomp: Mapping[str, Any] | None  # None: the runtime was given the compiled filter
    users: int  # first id of this host for users inside
    read_only: bool = False  # except folders in memory


def configuration(plan: ConfigOptions) -> dict[str, Any]:
    """Builds config.json for `plan`. It has no limits: the cgroup in which it starts has them."""
    ids = [{"containerID": 0, "hostID": plan.users, "size": SIZE}]
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in _NAMESPACES],
        "uidMappings": ids,
        "gidMappings": ids,
        "maskedPaths": MASKED,
        "readonlyPaths": READ_ONLY,
        "sysctl": SYSCTLS,
    }
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
    """Returns the command of the first process: the session's helper."""
    return [f"/{HELPER}", "--listen-fd", str(LISTENING), "--orphan-exit", f"{ORPHAN_S:.0f}"]


def variables(env: Mapping[str, str]) -> list[str]:
    """Returns `NAME=value` for the first process: the variables of every environment, then `env`."""
    return [f"{name}={value}" for name, value in {"PATH": _PATH, "HOSTNAME": HOSTNAME, **env}.items()]


def limits() -> dict[str, int]:
    """Returns limits by the names of `resource`; at most this process's own: no runtime can raise them everywhere."""
    values = {}
    for name, value in _LIMITS.items():
        _, hard = resource.getrlimit(getattr(resource, name))
        values[name] = value if hard == resource.RLIM_INFINITY else min(value, hard)
    return values


def mounts(*, read_only: bool) -> list[dict[str, Any]]:
    """Returns the mounts of config.json in order, without the control groups, which come last."""
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
    """Returns mounts that even programs without output files need; they count as memory of the environment."""
    size = f"size={SCRATCH_BYTES}"
    shared = [_mount(place, "tmpfs", "tmpfs", "nosuid", "nodev", "mode=1777", size) for place in ("/tmp", "/var/tmp")]
    return [*shared, _mount("/run", "tmpfs", "tmpfs", "nosuid", "nodev", "mode=755", size)]
