"""Reads the kernel's counters of a cgroup: kills for memory and their cause, refused processes, throttled time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.host import cgroups
from app.host.cgroups import PREFIX, container_folders

_UNLIMITED = 1 << 60
_LONGEST_BYTES = 4096
_NEAR_BYTES = 4 << 20
"""Margin below the limit: the peak lacks the last request (a huge page) and the memory cached by processors."""


def container_memory_events(container_id: str, init: int) -> Path | None:
    """Returns the file that counts kills of a container with first process `init`; None: not visible on this host."""
    for folder in container_folders(container_id, init, "memory"):
        for name in ("memory.oom_control", "memory.events"):
            if (text := _text(folder / name)) and _oom_kills(folder, text) is not None:
                return folder / name
    return None


class MemoryWatch:
    """Detects kills for an environment's memory limit, by its cgroup's own counter.

    An engine's "OOMKilled" is only about a container's first process, and exit code 137 is that of any SIGKILL. Each
    reading is compared with the last. Thread-safe: a kill is reported once.
    """

    def __init__(self, file: Path | None, inside: Callable[[], int | None]) -> None:
        """file: the cgroup's file on this host, if visible; `inside` reads in the environment, which takes longer."""
        self._file = file
        self._inside = inside
        self._lock = threading.Lock()
        self._known = 0
        self._without_kills: str | None = None  # after most commands the file is unchanged
        self._closed = False
        self._handle: int | None = None  # kept open to save system calls: it is read after each command of many threads
        self._release: Callable[[], object] = lambda: None

    @property
    def folder(self) -> Path | None:
        """Folder of the cgroup, where visible on this host."""
        return None if self._file is None else self._file.parent

    def killed(self, *, suspected: bool) -> bool:
        """Whether there was a kill since the last reading. Reads inside, which is slow, only when `suspected`."""
        if self._file is None and not suspected:
            return False
        with self._lock:
            if self._file is not None:
                text = self._text()
                if text is not None and text == self._without_kills:
                    return False
                self._without_kills = text if text and _number(text, "oom_kill") == 0 else None
            count = self._read()
            grown = count is not None and count > self._known
            self._known = max(self._known, count or 0)
        return grown

    def count(self) -> int | None:
        """Returns kills since the group's creation, reported or not; None: unknown. Raises: as `inside`."""
        with self._lock:
            return self._read()

    def host_kills(self) -> int | None:
        """Returns kills since the group's creation for lack of host memory (own limit not reached); None: unknown."""
        with self._lock:
            text = None if self._file is None else self._text()
        if text is None or self._file is None or (kills := _number(text, "oom_kill")) is None:
            return None
        own = _oom_kills(self._file.parent, text)
        return None if own is None else kills - own

    def _read(self) -> int | None:
        if self._file is None:
            return self._inside()
        text = self._text()
        return None if text is None else _oom_kills(self._file.parent, text)

    def _text(self) -> str | None:
        if self._closed or self._file is None:
            return None
        try:
            if self._handle is None:
                self._handle = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
                self._release = finalizer = weakref.finalize(self, os.close, self._handle)
                finalizer.atexit = False
            return os.pread(self._handle, _LONGEST_BYTES, 0).decode()
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Stops reporting. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._release()


class PidsWatch:
    """Counts processes that the kernel refused because of an environment's process limit. Thread-safe.

    A program that cannot start another gets "Resource temporarily unavailable", but may not report it.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        """folders: its cgroups. A missing one is ignored; one that starts no processes counts none."""
        self._files = tuple(folder / "pids.events" for folder in folders)

    def refused(self) -> int | None:
        """Returns the number since the groups' creation; None: this host shows none of them (any more)."""
        counts = [count for file in self._files if (count := _value(file, "max")) is not None]
        return sum(counts) if counts else None


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Usage of a cgroup: current memory, and CPU seconds since its creation. None: not visible here."""

    memory_bytes: int | None
    cpu_s: float | None


def usage(memory: Path | None, cpus: Iterable[Path]) -> GroupUsage | None:
    """Reads the usage of the cgroup with these folders; None: this host shows neither."""
    memory_bytes = None if memory is None else _first_number(memory, "memory.current", "memory.usage_in_bytes")
    cpu_s = next((seconds for folder in cpus if (seconds := _cpu_s(folder)) is not None), None)
    if cpu_s is None and memory_bytes is not None and memory is not None:
        cpu_s = _cpu_s_of_processes(memory)
    return None if memory_bytes is None and cpu_s is None else GroupUsage(memory_bytes, cpu_s)


def _cpu_s(folder: Path) -> float | None:
    if (count := _value(folder / "cpu.stat", "usage_usec")) is not None:
        return count * 1e-6
    # Version 1 counts CPU time in the controller cpuacct: the same hierarchy as cpu, or one with the same paths.
    count, limits = _first_number(folder, "cpuacct.usage"), cgroups.ROOT / "cpu"
    if count is None and folder.is_relative_to(limits):
        count = _first_number(cgroups.ROOT / "cpuacct" / folder.relative_to(limits), "cpuacct.usage")
    return None if count is None else count * 1e-9


def _cpu_s_of_processes(folder: Path) -> float:
    """Returns CPU seconds of a group's processes and their reaped children, for use when no controller counts them."""
    ticks = 0
    for process in _text(folder / "cgroup.procs").split():
        fields = _text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # its own in user and kernel, then its children's
    return ticks / os.sysconf("SC_CLK_TCK")


def _first_number(folder: Path, *names: str) -> int | None:
    with suppress(ValueError):
        return next((int(text) for name in names if (text := _text(folder / name))), None)
    return None


def throttled_s(folders: Iterable[Path]) -> float | None:
    """Returns the throttled seconds of the first group that counts them; None: none does."""
    for folder in folders:
        text = _text(folder / "cpu.stat")
        for name, unit_s in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
            if (count := _number(text, name)) is not None:
                return count * unit_s
    return None


def _oom_kills(group: Path, text: str) -> int | None:
    """Returns kills for the limit of this group or a MegaFlow group above it; None: the text has no counter."""
    kills = _number(text, "oom_kill")
    with suppress(OSError, ValueError):
        return 0 if kills and not _was_full(group) else kills
    return None


def _was_full(group: Path) -> bool:
    """Whether a group, or a parent up to the first with a limit (and then MegaFlow's further ones), reached its limit.

    If not, the whole host was short of memory, and the kill is not the task's fault. True when no limit is visible.
    """
    limited = False
    for place in (group, *group.parents):
        if limited and not place.name.startswith(PREFIX):
            return False
        if (limits := place / "memory.max").exists():
            if limits.read_text().strip() != "max":
                limited = True
                if _value(place / "memory.events", "oom"):
                    return True
        elif (limits := place / "memory.limit_in_bytes").exists():
            if (limit := int(limits.read_text())) < _UNLIMITED:
                limited = True
                peaks = [place / f"{name}.max_usage_in_bytes" for name in ("memory", "memory.memsw")]
                if any(int(one.read_text()) >= limit - _NEAR_BYTES for one in peaks if one.exists()):
                    return True
        else:
            break
    return not limited


def _value(file: Path, name: str) -> int | None:
    """Returns the number after a name in a file of such lines; None: it is missing."""
    return _number(_text(file), name)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(text: str, name: str) -> int | None:
    with suppress(ValueError):
        for line in text.splitlines():
            word, _, value = line.partition(" ")
            if word == name:
                return int(value)
    return None
