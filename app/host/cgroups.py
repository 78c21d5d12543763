"""Manages cgroups v1 and v2: sets limits, finds a container's group, reads its processes.

`Cgroup` replaces the runtime's own handling: moving a process into a cgroup waits for the whole kernel (5-15 ms), but a
thread that moves itself does not wait. The thread that starts an environment joins its cgroup first, and the
environment's processes inherit it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from app.host.privileges import cpu_shares
from app.models.spec import Resources

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_PROCESSES = "cgroup.procs"
_CONTROLLERS = ("memory", "cpu", "pids", "devices")
DEVICES = tuple(f"c {number} rwm" for number in ("1:3", "1:5", "1:7", "1:8", "1:9", "5:0", "5:1", "5:2", "136:*"))
"""Device rules for null, zero, full, random, urandom and terminals."""
PREFIX = "megaflow-"
_YOUNG_S = 3600.0
_POLL_S = 0.0005
_KILL_POLLS = 10
"""Number of polls after which the remaining processes are killed again."""


@dataclass(frozen=True)
class Cgroup:
    """Cgroup `megaflow-NAME`: one folder per controller (version 1), or one folder (version 2)."""

    name: str

    @cached_property
    def unified(self) -> bool:
        """Whether this host has only version 2."""
        return (ROOT / "cgroup.controllers").exists()

    @cached_property
    def folders(self) -> list[Path]:
        own = f"{PREFIX}{self.name}"
        return [ROOT / own] if self.unified else [ROOT / controller / own for controller in _CONTROLLERS]

    def make(self, resources: Resources, devices: Sequence[str] | None = DEVICES) -> None:
        """Creates the cgroup, or sets its limits again. devices: None: as in the parent group. Raises: OSError."""
        if self.unified:
            self._make_unified(resources)
        else:
            self._make_divided(resources, devices)

    def _make_divided(self, resources: Resources, allowed: Sequence[str] | None) -> None:
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
        memory, cpu, pids, devices = self.folders
        most = str(resources.most.memory_bytes)
        _write(memory / "memory.limit_in_bytes", most)
        _write_if_there(memory / "memory.memsw.limit_in_bytes", most)  # else swap is not counted
        _write(cpu / "cpu.shares", str(cpu_shares(resources)))
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
        _write(folder / "memory.max", str(resources.most.memory_bytes))
        _write_if_there(folder / "memory.swap.max", "0")
        _write(folder / "cpu.weight", str(max(1, cpu_shares(resources) * 100 // 1024)))
        _write(folder / "cpu.max", f"{_quota_us(resources)} {_PERIOD_US}")
        _write(folder / "pids.max", str(resources.pids))

    @contextmanager
    def joined(self) -> Iterator[list[str]]:
        """Starts processes in the cgroup: yields the prefix for their command lines.

        Version 1: this thread joins, and stays until it ends. Version 2 has no separate threads: a shell joins and then
        executes the command.
        """
        if self.unified:
            (folder,) = self.folders
            yield ["/bin/sh", "-c", f'echo 0 > {folder}/{_PROCESSES} && exec "$@"', "sh"]
            return
        for folder in self.folders:
            _write(folder / "tasks", "0")
        yield []

    def processes(self) -> list[int]:
        """Returns the process ids in it, as numbered on this host."""
        return [pid for pid in _processes(self.folders[:1]) if self._contains(pid)]

    def _contains(self, pid: int) -> bool:
        # Version 1 also lists a worker while one of its threads starts an environment: it must not be killed.
        return pid != os.getpid() and any(f"/{PREFIX}{self.name}" in line for line in _groups_of(pid))

    @property
    def memory_events(self) -> Path:
        """File that counts kills for the memory limit, once the environment was started."""
        return self.folders[0] / ("memory.events" if self.unified else "memory.oom_control")

    @property
    def cpu_folder(self) -> Path:
        """Folder in which the kernel counts the time throttled by the CPU limit."""
        return self.folders[0 if self.unified else _CONTROLLERS.index("cpu")]

    @property
    def pids_folder(self) -> Path:
        """Folder in which the kernel counts the processes refused by the process limit."""
        return self.folders[0 if self.unified else _CONTROLLERS.index("pids")]

    def mounts(self) -> list[dict[str, Any]]:
        """Returns mounts for the runtime's specification: programs inside read their limits there."""
        if self.unified:
            return [_mount("/sys/fs/cgroup", "bind", str(self.folders[0]), "bind")]
        binds = [
            _mount(f"/sys/fs/cgroup/{controller}", "bind", str(folder), "bind")
            for controller, folder in zip(_CONTROLLERS, self.folders, strict=True)
            if controller != "devices"
        ]
        return [_mount("/sys/fs/cgroup", "tmpfs", "tmpfs", "mode=755", "size=64k"), *binds]

    def end(self, *, timeout_s: float) -> bool:
        """Kills all processes in it and removes it; False: some did not end in time. Missing: True."""
        deadline = time.monotonic() + timeout_s
        remaining, polls = self._everywhere(), 0
        while remaining:
            if polls % _KILL_POLLS == 0:
                self._kill()
            remaining = [folder for folder in remaining if not _removed(folder)]
            if time.monotonic() >= deadline:
                break
            if remaining:
                time.sleep(_POLL_S)
            polls += 1
        return not remaining

    def remove(self, *, timeout_s: float) -> bool:
        """Removes it, waiting until it has no processes; False: it still had some at the timeout. Missing: True."""
        deadline = time.monotonic() + timeout_s
        while remaining := [folder for folder in self._everywhere() if not _removed(folder)]:
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        return not remaining

    def _everywhere(self) -> list[Path]:
        """Returns our folders, and folders of the same name that a runtime created for other controllers."""
        places = [f"{ROOT}/{name}/{PREFIX}{self.name}" for name in os.listdir(ROOT)]
        return self.folders if self.unified else [Path(place) for place in places if os.path.isdir(place)]

    def _kill(self) -> None:
        if self.unified and (self.folders[0] / "cgroup.kill").exists():  # since Linux 5.14
            with suppress(OSError):
                _write(self.folders[0] / "cgroup.kill", "1")
            return
        place = self.folders[0] if self.unified else self.folders[_CONTROLLERS.index("pids")]
        with suppress(OSError):  # no new process starts while the others are killed
            _write(place / "pids.max", "0")
        for pid in self.processes():
            self._kill_one(pid)

    def _kill_one(self, pid: int) -> None:
        """Kills a process through a pidfd, since another process may get the same number at any time."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return
        try:
            if self._contains(pid):
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def remove_abandoned() -> int:
    """Removes MegaFlow's cgroups that are empty and older than an hour; returns the number of folders.

    They remain when a home is deleted and its worker is killed. The cgroup of a running environment is not
    empty: it has the first process.
    """
    unified = (ROOT / "cgroup.controllers").exists()
    removed = 0
    for place in [ROOT] if unified else [ROOT / name for name in os.listdir(ROOT)]:
        for folder in place.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > _YOUNG_S:
                    removed += _removed(folder) or _removed(folder)  # twice: the first call removes child groups
    return removed


def container_folders(container_id: str, init: int, controller: str) -> Iterator[Path]:
    """Returns a container's folders of a controller (version 2: of all); none: the process is not the container's."""
    for line in _groups_of(init):
        _, controllers, path = line.split(":", 2)
        if container_id not in path:  # the number belongs to a process outside the container
            continue
        if controllers == controller:
            yield ROOT / controller / path.lstrip("/")
        elif not controllers:
            yield ROOT / path.lstrip("/")


def container_processes(container_id: str, init: int) -> list[int]:
    """Returns the processes of a container with first process `init`, as numbered here; none: it is elsewhere."""
    return _processes(container_folders(container_id, init, "pids"))


def in_container(container_id: str, process: int) -> bool:
    """Whether a process of this host is in a container; False when the engine is on another host."""
    return any(container_id in line for line in _groups_of(process))


def _groups_of(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cgroup").read_text().splitlines()
    except OSError:
        return []


def _processes(folders: Iterable[Path]) -> list[int]:
    pids: set[int] = set()
    for folder in folders:
        with suppress(OSError):
            pids |= {int(line) for line in (folder / _PROCESSES).read_text().split()}
    return sorted(pids)


def _mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    closed = ["nosuid", "noexec", "nodev", "ro"]
    return {"destination": destination, "type": kind, "source": source, "options": [*options, *closed]}


def _quota_us(resources: Resources) -> int:
    """Returns the quota, set even for all CPUs: programs count CPUs by it, otherwise by the shares (JVMs before 19)."""
    return max(1000, round(min(resources.most.cpus, os.cpu_count() or 1) * _PERIOD_US))


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
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # it has processes or child groups
        with suppress(OSError), os.scandir(folder) as entries:
            for below in [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]:
                _removed(below)
        return False
    return True
