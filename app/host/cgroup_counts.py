"""What the kernel counts of a control group: kills for memory and whose they are, processes refused, time held up."""

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
"""The last request is not part of the recorded peak: a huge page, and what processors have cached."""


def container_memory_events(container_id: str, init: int) -> Path | None:
    """The file that counts kills of a container with that first process; None when this host does not show it."""
    for folder in container_folders(container_id, init, "memory"):
        for name in ("memory.oom_control", "memory.events"):
            if (text := _text(folder / name)) and _oom_kills(folder, text) is not None:
                return folder / name
    return None


class MemoryWatch:
    """Whether the kernel killed for an environment's memory limit: by its control group's own count.

    An engine's "OOMKilled" tells it only of a container's first process, and exit code 137 is every SIGKILL's. Counts
    from one reading to the next. Safe for many threads: a kill is reported once.
    """

    def __init__(self, file: Path | None, inside: Callable[[], int | None]) -> None:
        """`file`: what this host shows of the group; `inside` asks the environment itself, which takes longer."""
        self._file = file
        self._inside = inside
        self._lock = threading.Lock()
        self._known = 0
        self._without_kills: str | None = None  # after most commands the file says the same as before
        self._closed = False
        self._handle: int | None = None  # kept open: after each command of many threads, every system call counts
        self._release: Callable[[], object] = lambda: None

    @property
    def folder(self) -> Path | None:
        """The control group's, where this host shows it."""
        return None if self._file is None else self._file.parent

    def killed(self, *, suspected: bool) -> bool:
        """True when there was a kill since the last reading. Only when `suspected` is it worth asking inside."""
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
        """Kills since the group was made, reported or not; None when unknown. Raises: what `inside` does."""
        with self._lock:
            return self._read()

    def host_kills(self) -> int | None:
        """Kills since then for want of the host's memory, the group's own limit never met; None when unknown."""
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
        """Report nothing any more. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._release()


class PidsWatch:
    """How many processes the kernel refused for an environment's limit of them. Safe for many threads.

    A program that cannot start another gets "Resource temporarily unavailable", and need not pass it on.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        """folders: its control groups; what starts no processes counts none, and what is not there is passed over."""
        self._files = tuple(folder / "pids.events" for folder in folders)

    def refused(self) -> int | None:
        """Since the groups were made; None where this host shows none of them (any more)."""
        counts = [count for file in self._files if (count := _value(file, "max")) is not None]
        return sum(counts) if counts else None


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """What a control group uses: memory now, and processor seconds since it was made. None: not shown here."""

    memory_bytes: int | None
    cpu_s: float | None


def usage(memory: Path | None, cpus: Iterable[Path]) -> GroupUsage | None:
    """Of the group with these folders; None: this host shows neither."""
    memory_bytes = None if memory is None else _first_number(memory, "memory.current", "memory.usage_in_bytes")
    cpu_s = next((seconds for folder in cpus if (seconds := _cpu_s(folder)) is not None), None)
    if cpu_s is None and memory_bytes is not None and memory is not None:
        cpu_s = _cpu_s_of_processes(memory)
    return None if memory_bytes is None and cpu_s is None else GroupUsage(memory_bytes, cpu_s)


def _cpu_s(folder: Path) -> float | None:
    if (count := _value(folder / "cpu.stat", "usage_usec")) is not None:
        return count * 1e-6
    # Version 1 counts it beside the limit, in a hierarchy that is the same one, or of the same shape.
    count, limits = _first_number(folder, "cpuacct.usage"), cgroups.ROOT / "cpu"
    if count is None and folder.is_relative_to(limits):
        count = _first_number(cgroups.ROOT / "cpuacct" / folder.relative_to(limits), "cpuacct.usage")
    return None if count is None else count * 1e-9


def _cpu_s_of_processes(folder: Path) -> float:
    """What a group's processes have used with the ended ones that they waited for: where no controller counts it."""
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
    """How long the limit of processors has held up the first of these groups that counts it; None: none does."""
    for folder in folders:
        text = _text(folder / "cpu.stat")
        for name, unit_s in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
            if (count := _number(text, name)) is not None:
                return count * unit_s
    return None


def _oom_kills(group: Path, text: str) -> int | None:
    """Kills for the limit of this group or one of MegaFlow above it; None when the text of its file has no count."""
    kills = _number(text, "oom_kill")
    with suppress(OSError, ValueError):
        return 0 if kills and not _was_full(group) else kills
    return None


def _was_full(group: Path) -> bool:
    """Whether a group ever was at its limit, or at that of the first above it that has one; ours above that count, too.

    Where it never was, the whole host was short of memory, and the kill is not the task's. Yes, where no limit shows.
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
    """The number behind a name in a file of such lines; None: it is not there."""
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
