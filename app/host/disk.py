"""Measures disk space below a folder, and recognises a full disk.

Measuring uses directory handles instead of paths and follows no links: processes inside may change the tree meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from app.errors import DiskFull

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
MOST_FILES = 1 << 22
"""Counting stops just above this number: no limit of files is higher, and counting must not take minutes."""
_MOST_HANDLES = 1 << 20
"""Maximum number of one environment's open files that are checked: takes some seconds."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def no_space(text: str) -> bool:
    """Whether a message reports a full disk."""
    return "no space left on device" in text.lower() or "disk quota exceeded" in text.lower()


@contextmanager
def disk_named(doing: str) -> Iterator[None]:
    """Converts the system's error for a full disk in the block; others pass unchanged. Raises: DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"{doing}: {error}; free some space under MEGAFLOW_HOME.") from error
        raise


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Usage of a disk: bytes, and names in folders (each hard link counts, so at least the number of inodes)."""

    size_bytes: int = 0
    files: int = 0

    @classmethod
    def of(cls, *folders: Path) -> DiskUsage:
        """Measures folders, each on its own file system only; a missing folder counts 0. Raises: OSError."""
        return cls.added(_of(folder) for folder in folders)

    @classmethod
    def held(cls, processes: Iterable[int], *folders: Path) -> DiskUsage:
        """Measures deleted files, which use the disk while these processes of this host have them open or mapped.

        folders: where the processes write outside their root. Only root sees such files; files in transit through a
        socket are not seen. With too many open files to check, the result is above every limit.
        """
        return _held(processes, {os.stat(folder).st_dev for folder in folders if folder.exists()})

    @classmethod
    def added(cls, parts: Iterable[DiskUsage]) -> DiskUsage:
        usages = list(parts)
        return cls(sum(one.size_bytes for one in usages), sum(one.files for one in usages))


def _of(folder: Path) -> DiskUsage:
    walk = _Walk(folder)
    try:
        while walk.files <= MOST_FILES and walk.on():
            pass
    except FileNotFoundError:  # the folder itself was removed
        pass
    finally:
        walk.close()
    return DiskUsage(walk.total_bytes, walk.files)


def _held(processes: Iterable[int], devices: set[int]) -> DiskUsage:
    sizes: dict[tuple[int, int], int] = {}
    looked = 0
    for process in processes:
        for task in _tasks(process):
            with suppress(OSError):
                root = os.stat(f"{task}/root").st_dev
                for handle in _handles(task):
                    looked += 1
                    with suppress(OSError):
                        status = os.stat(handle)
                        on_disk = stat.S_ISREG(status.st_mode) and status.st_dev in {root, *devices}
                        if on_disk and status.st_nlink == 0:
                            sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
                    if looked > _MOST_HANDLES:
                        return DiskUsage(sum(sizes.values()), MOST_FILES + 1)
    return DiskUsage(sum(sizes.values()), len(sizes))


def _tasks(process: int) -> list[str]:
    """Returns /proc folders: the process, or its threads when its first thread has ended."""
    place = f"/proc/{process}"
    with suppress(OSError):
        if os.path.exists(f"{place}/root"):
            return [place]
        return [f"{place}/task/{thread}" for thread in os.listdir(f"{place}/task")]
    return []


def _handles(task: str) -> Iterator[str]:
    """Returns paths of a task's open files, and of mapped files that were deleted."""
    with os.scandir(f"{task}/fd") as entries:
        yield from (one.path for one in entries)
    with open(f"{task}/maps") as lines:
        yield from (f"{task}/map_files/{_range(line)}" for line in lines if line.endswith("(deleted)\n"))


def _range(line: str) -> str:
    """Returns a line's address range as `map_files` names it: without leading zeros."""
    begin, end = line.split()[0].split("-")
    return f"{int(begin, 16):x}-{int(end, 16):x}"


class _Walk:
    def __init__(self, folder: Path) -> None:
        self._top = folder
        self._here = -1
        self._trail: list[tuple[str, tuple[int, int], list[str]]] = []  # name, identity, folders still to visit there
        self._device = 0
        self._linked: set[int] = set()  # files with several names: their bytes count once
        self.total_bytes = 0
        self.files = 0

    def on(self) -> bool:
        """Does one step; False: all was visited."""
        if self._here < 0:
            top = os.open(self._top, _FOLDER)
            self._device = os.fstat(top).st_dev
            self._enter(top, "")
        elif self._trail[-1][2]:
            name = self._trail[-1][2].pop()
            with suppress(OSError):  # removed, or replaced by a file
                self._enter(os.open(name, _FOLDER, dir_fd=self._here), name)
        elif len(self._trail) == 1:
            return False
        else:
            self._leave()
        return True

    def _enter(self, handle: int, name: str) -> None:
        self._change_to(handle)
        below = []
        with suppress(OSError), os.scandir(handle) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev == self._device:
                        self._count(status)
                        if stat.S_ISDIR(status.st_mode):
                            below.append(entry.name)
                if self.files > MOST_FILES:
                    break
        self._trail.append((name, _identity(handle), below))

    def _count(self, about: os.stat_result) -> None:
        self.files += 1
        if about.st_nlink > 1 and not stat.S_ISDIR(about.st_mode):
            if about.st_ino in self._linked:
                return
            self._linked.add(about.st_ino)
        self.total_bytes += about.st_blocks * 512

    def _leave(self) -> None:
        self._trail.pop()
        self._change_to(os.open("..", _FOLDER, dir_fd=self._here))
        if _identity(self._here) != self._trail[-1][1]:  # it was moved meanwhile
            self._find_back()

    def _find_back(self) -> None:
        """Goes to the deepest folder of the trail that is still in its place."""
        self._change_to(os.open(self._top, _FOLDER))
        for depth in range(1, len(self._trail)):
            name, identity, _ = self._trail[depth]
            try:
                below = os.open(name, _FOLDER, dir_fd=self._here)
            except OSError:
                below = -1
            if below < 0 or _identity(below) != identity:
                if below >= 0:
                    os.close(below)
                del self._trail[depth:]
                return
            self._change_to(below)

    def _change_to(self, handle: int) -> None:
        self.close()
        self._here = handle

    def close(self) -> None:
        if self._here >= 0:
            os.close(self._here)
            self._here = -1


def _identity(handle: int) -> tuple[int, int]:
    status = os.fstat(handle)
    return status.st_dev, status.st_ino
