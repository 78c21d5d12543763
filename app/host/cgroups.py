"""Limits of one environment: a cgroup of our own making, of version 1 or 2, so that no runtime has to know which.

Why not the runtime's own: moving a process into a cgroup waits for the whole kernel (5-15 ms), a thread that moves
itself does not. The thread that starts an environment joins its cgroup first, and the environment is born in it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from app.host.privileges import CPU_SHARES
from app.models.spec import Resources

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_PROCESSES = "cgroup.procs"
_CONTROLLERS = ("memory", "cpu", "pids", "devices")
DEVICES = tuple(f"c {number} rwm" for number in ("1:3", "1:5", "1:7", "1:8", "1:9", "5:0", "5:1", "5:2", "136:*"))
"""null, zero, full, random, urandom; terminals."""
NESTED = "runtime"
"""Where a runtime that must have a cgroup of its own has it, below ours."""
_PREFIX = "megaflow-"
_YOUNG_S = 3600.0
_POLL_S = 0.0005
_KILL_POLLS = 10
"""So many looks whether all are gone before they are killed once more."""


@dataclass(frozen=True)
class Cgroup:
    """The cgroup `megaflow-NAME`: a folder of each controller (version 1), or one folder."""

    name: str

    @cached_property
    def unified(self) -> bool:
        """Whether this host has version 2 alone."""
        return (ROOT / "cgroup.controllers").exists()

    @cached_property
    def folders(self) -> list[Path]:
        own = f"{_PREFIX}{self.name}"
        return [ROOT / own] if self.unified else [ROOT / controller / own for controller in _CONTROLLERS]

    # --- Making ---------------------------------------------------------------------------------------------------

    def make(self, resources: Resources, devices: Sequence[str] | None = DEVICES) -> None:
        """Make it, with its limits; or set them again. devices: None: those of the group above.

        Raises: OSError: no such controller here, or not ours to use.
        """
        if self.unified:
            self._make_unified(resources)
        else:
            self._make_divided(resources, devices)

    def _make_divided(self, resources: Resources, allowed: Sequence[str] | None) -> None:
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
        memory, cpu, pids, devices = self.folders
        _write(memory / "memory.limit_in_bytes", str(resources.memory_bytes))
        _write_if_there(memory / "memory.memsw.limit_in_bytes", str(resources.memory_bytes))  # else swap is not counted
        _write(cpu / "cpu.shares", str(CPU_SHARES))
        _write(cpu / "cpu.cfs_period_us", str(_PERIOD_US))
        _write(cpu / "cpu.cfs_quota_us", str(_quota_us(resources)))
        _write(pids / "pids.max", str(resources.pids))
        if allowed is not None:
            _write(devices / "devices.deny", "a")
        for rule in allowed or ():
            _write(devices / "devices.allow", rule)

    def _make_unified(self, resources: Resources) -> None:
        control = ROOT / "cgroup.subtree_control"
        if lacking := {"memory", "cpu", "pids"} - set(control.read_text().split()):
            _write(control, " ".join(f"+{name}" for name in sorted(lacking)))
        (folder,) = self.folders
        folder.mkdir(exist_ok=True)
        _write(folder / "memory.max", str(resources.memory_bytes))
        _write_if_there(folder / "memory.swap.max", "0")
        _write(folder / "cpu.weight", str(max(1, CPU_SHARES * 100 // 1024)))
        _write(folder / "cpu.max", f"{_quota_us(resources)} {_PERIOD_US}")
        _write(folder / "pids.max", str(resources.pids))

    @contextmanager
    def joined(self) -> Iterator[list[str]]:
        """Start processes inside: what to put before their command lines.

        Version 1: this thread joins, and stays until it ends. Version 2 knows no threads apart: a shell joins and
        becomes what it starts.
        """
        if self.unified:
            (folder,) = self.folders
            yield ["/bin/sh", "-c", f'echo 0 > {folder}/{_PROCESSES} && exec "$@"', "sh"]
            return
        for folder in self.folders:
            _write(folder / "tasks", "0")
        yield []

    # --- Looking --------------------------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Who is in it, by this host's numbers."""
        found: set[int] = set()
        for folder in (self.folders[0], self.folders[0] / NESTED):
            with suppress(OSError):
                found |= {int(line) for line in (folder / _PROCESSES).read_text().split()}
        return sorted(pid for pid in found if self._holds(pid))

    def _holds(self, pid: int) -> bool:
        # A thread that is starting an environment makes its worker appear in version 1's list: not to be killed.
        try:
            return pid != os.getpid() and f"/{_PREFIX}{self.name}" in Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return False

    @property
    def memory_events(self) -> Path:
        """The file that counts what the memory limit has killed, once it has been started."""
        if self.unified:
            return self.folders[0] / "memory.events"
        nested = self.folders[0] / NESTED  # version 1 counts a kill where the process was
        return (nested if nested.is_dir() else self.folders[0]) / "memory.oom_control"

    @property
    def pids_folders(self) -> tuple[Path, Path]:
        """Where the kernel counts what the limit of processes has refused: each version in one of them."""
        own = self.folders[0 if self.unified else _CONTROLLERS.index("pids")]
        return own, own / NESTED

    def mounts(self) -> list[dict[str, Any]]:
        """For the specification: what programs inside read to learn their limits."""
        if self.unified:
            return [_mount("/sys/fs/cgroup", "bind", str(self.folders[0]), "bind")]
        binds = [
            _mount(f"/sys/fs/cgroup/{controller}", "bind", str(folder), "bind")
            for controller, folder in zip(_CONTROLLERS, self.folders, strict=True)
            if controller != "devices"
        ]
        return [_mount("/sys/fs/cgroup", "tmpfs", "tmpfs", "mode=755", "size=64k"), *binds]

    # --- Ending ---------------------------------------------------------------------------------------------------

    def end(self, *, timeout_s: float) -> bool:
        """Kill everybody in it and remove it; False when some would not die in time. Not there: fine."""
        deadline = time.monotonic() + timeout_s
        left, polls = self._everywhere(), 0
        while left:
            if polls % _KILL_POLLS == 0:
                self._kill()
            left = [folder for folder in left if not _removed(folder)]
            if time.monotonic() >= deadline:
                break
            if left:
                time.sleep(_POLL_S)
            polls += 1
        return not left

    def remove(self, *, timeout_s: float) -> bool:
        """Remove it unless somebody is in it; False when that is so for as long as this. Not there: fine."""
        deadline = time.monotonic() + timeout_s
        while left := [folder for folder in self._everywhere() if not _removed(folder)]:
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        return not left

    def _everywhere(self) -> list[Path]:
        """Our folders, and those that a runtime has made of the same name for other controllers."""
        places = [f"{ROOT}/{name}/{_PREFIX}{self.name}" for name in os.listdir(ROOT)]
        return self.folders if self.unified else [Path(place) for place in places if os.path.isdir(place)]

    def _kill(self) -> None:
        if self.unified:
            with suppress(OSError):
                _write(self.folders[0] / "cgroup.kill", "1")
            return
        with suppress(OSError):  # nobody is born while the others die
            _write(self.folders[_CONTROLLERS.index("pids")] / "pids.max", "0")
        for pid in self.processes():
            self._kill_one(pid)

    def _kill_one(self, pid: int) -> None:
        """Through a handle, since a number may be somebody else's a moment later."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return
        try:
            if self._holds(pid):
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def remove_abandoned() -> int:
    """Remove cgroups of ours that nobody is in and that are no longer young; how many folders.

    Nobody else knows of them: they are of a home that somebody deleted while its worker was killed. A living
    environment's first process keeps its own.
    """
    unified = (ROOT / "cgroup.controllers").exists()
    removed = 0
    for place in [ROOT] if unified else [ROOT / name for name in os.listdir(ROOT)]:
        for folder in place.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > _YOUNG_S:
                    removed += _removed(folder) or _removed(folder)  # first those below it
    return removed


def _mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    closed = ["nosuid", "noexec", "nodev", "ro"]
    return {"destination": destination, "type": kind, "source": source, "options": [*options, *closed]}


def _quota_us(resources: Resources) -> int:
    """Also when it may have all: programs count their processors by it, or else by the shares (JVMs before 19)."""
    return max(1000, round(min(resources.cpus, os.cpu_count() or 1) * _PERIOD_US))


def _write(file: Path | str, value: str) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, value.encode())
    finally:
        os.close(handle)


def _write_if_there(file: Path, value: str) -> None:
    if file.exists():
        _write(file, value)


def _removed(folder: Path) -> bool:
    """Whether the cgroup's folder is gone, with those that something made below it."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # processes, or folders below
        with suppress(OSError), os.scandir(folder) as entries:
            for below in [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]:
                _removed(below)
        return False
    return True
