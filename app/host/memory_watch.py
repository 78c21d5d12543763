"""Whether the kernel killed for an environment's memory limit: by its control group's own count.

An engine's "OOMKilled" tells it only of a container's first process, and exit code 137 is every SIGKILL's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from app.host.control_groups import folders_of

_OURS = "megaflow-"
"""How the names of groups begin that we make: each holds one task."""
_LONGEST_BYTES = 4096
_MOST = ("memory.max_usage_in_bytes", "memory.memsw.max_usage_in_bytes")
_UNLIMITED = 1 << 60
_NEAR_BYTES = 4 << 20
"""What was asked for last is not among the most that was used: a huge page, and what processors have in hand."""


class MemoryWatch:
    """Counts from one look to the next. Safe for many threads: a kill is told once."""

    def __init__(self, file: Path | None, inside: Callable[[], int | None]) -> None:
        """`file`: what this host shows of the group; `inside` asks the environment itself, which takes longer."""
        self._counter = None if file is None else _Counter(file)
        self._inside = inside
        self._lock = threading.Lock()
        self._known = 0

    def killed(self, *, suspected: bool) -> bool:
        """True when there was a kill since the last look. Only when `suspected` is it worth asking inside."""
        if self._counter is None and not suspected:
            return False
        with self._lock:
            count = self._inside() if self._counter is None else self._counter.read()
            grown = count is not None and count > self._known
            self._known = max(self._known, count or 0)
        return grown

    def count(self) -> int | None:
        """Kills since the group was made, told or not; None when nobody shows it. Raises: what `inside` does."""
        with self._lock:
            return self._inside() if self._counter is None else self._counter.read()

    def close(self) -> None:
        """Nothing is counted any more. Safe to call twice."""
        with self._lock:
            if self._counter is not None:
                self._counter.close()


class _Counter:
    """A group's file, open until it is closed: after each command, every system call counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._handle: int | None = None
        self._close: Callable[[], object] | None = None
        self._closed = False

    def read(self) -> int | None:
        """The count; None when it cannot be read (any more)."""
        if self._closed:
            return None
        try:
            if self._handle is None:
                self._handle = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
                self._close = finalizer = weakref.finalize(self, os.close, self._handle)
                finalizer.atexit = False
            kills = _kills(os.pread(self._handle, _LONGEST_BYTES, 0))
            return 0 if kills and not _was_full(self._file.parent) else kills
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        self._closed = True
        if self._close is not None:
            self._close()


def _was_full(group: Path) -> bool:
    """Whether a group ever was at its limit, or at that of the first above it that has one; ours above that count, too.

    Where it never was, the whole host was short of memory, and the kill is not the task's. Yes, where nobody shows it.
    """
    limited = False
    for place in (group, *group.parents):
        if limited and not place.name.startswith(_OURS):
            return False
        if (limits := place / "memory.max").exists():
            if limits.read_text().strip() != "max":
                limited = True
                if _number((place / "memory.events").read_bytes(), b"\noom "):
                    return True
        elif (limits := place / "memory.limit_in_bytes").exists():
            if (limit := int(limits.read_text())) < _UNLIMITED:
                limited = True
                most = [place / name for name in _MOST if (place / name).exists()]
                if any(int(one.read_text()) >= limit - _NEAR_BYTES for one in most):
                    return True
        else:
            break
    return not limited


def _kills(content: bytes) -> int | None:
    return _number(content, b"oom_kill ")


def _number(content: bytes, name: bytes) -> int | None:
    at = content.find(name)
    return None if at < 0 else int(content[at:].split(maxsplit=2)[1])


def file_of(container_id: str, init: int) -> Path | None:
    """Where this host counts for a container with that first process; None when it does not show it."""
    for folder in folders_of(container_id, init, "memory"):
        for name in ("memory.oom_control", "memory.events"):
            if (found := _there(folder / name)) is not None:
                return found
    return None


def _there(file: Path) -> Path | None:
    counter = _Counter(file)
    with closing(counter):
        return file if counter.read() is not None else None
