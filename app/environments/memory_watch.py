"""Whether the kernel killed for an environment's memory limit: by its control group's own count.

An engine's "OOMKilled" tells it only of a container's first process, and exit code 137 is every SIGKILL's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_LONGEST_BYTES = 4096


class MemoryWatch:
    """Counts from one look to the next. Safe for many threads: a kill is told once."""

    def __init__(self, file: Path | None, inside: Callable[[], int | None], known: int = 0) -> None:
        """`file`: what this host shows of the group; `inside` asks the environment itself, which takes longer.

        known: kills that were told before.
        """
        self._file = file
        self._inside = inside
        self._lock = threading.Lock()
        self._known = known

    @property
    def known(self) -> int:
        """Kills that were told."""
        return self._known

    def killed(self, *, suspected: bool) -> bool:
        """True when there was a kill since the last look. Only when `suspected` is it worth asking inside."""
        if self._file is None and not suspected:
            return False
        with self._lock:
            count = self._inside() if self._file is None else oom_kills(self._file)
            grown = count is not None and count > self._known
            self._known = max(self._known, count or 0)
        return grown


def oom_kills(file: Path) -> int | None:
    """The count in memory.events or memory.oom_control; None when it cannot be read (any more)."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)  # after each command: every call counts
        try:
            content = os.read(handle, _LONGEST_BYTES)
        finally:
            os.close(handle)
        for line in content.splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def file_of(container_id: str, init: int) -> Path | None:
    """Where this host counts for a container with that first process; None when it does not show it."""
    for line in _groups(init):
        _, controllers, path = line.split(":", 2)
        if container_id not in path:  # a process of that number, but not that container's
            continue
        if controllers == "memory":
            return _there(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
        if not controllers and (found := _there(_CGROUPS / path.lstrip("/") / "memory.events")):
            return found
    return None


def is_of(container_id: str, init: int) -> bool:
    """Whether the process of that number on this host is in that container: not so when the engine is elsewhere."""
    return any(container_id in line for line in _groups(init))


def _groups(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cgroup").read_text().splitlines()
    except OSError:
        return []


def _there(file: Path) -> Path | None:
    return file if oom_kills(file) is not None else None
