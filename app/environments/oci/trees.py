"""Files that an environment wrote, added up and removed, however deep: deeper than a path may be long, or calls may go.

Nothing is reached by a path, and no link is followed: what runs inside may change everything meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH = 64
"""Folders further down are moved up before they are removed, so that neither calls nor open files add up."""


# --- Removal ----------------------------------------------------------------------------------------------------------


def remove(folder: Path) -> int:
    """Remove a folder that nobody changes any more; how many files and folders were in it. Not there: fine.

    Raises: OSError.
    """
    try:
        with opened(str(folder)) as top:
            removal = _Removal(top)
            while removal.empty(top, 0):
                pass
        os.rmdir(folder)
    except FileNotFoundError:
        return 0
    return removal.count


class _Removal:
    def __init__(self, top: int) -> None:
        self._top = top
        self._moved = 0
        self.count = 0

    def empty(self, folder: int, depth: int) -> bool:
        """Whether something was moved to the top, which must be emptied once more."""
        before = self._moved
        for name, is_folder in _entries(folder):
            self.count += 1
            with suppress(FileNotFoundError):  # others may be removing it, too
                self._end(name, is_folder, folder, depth)
        return self._moved > before

    def _end(self, name: str, is_folder: bool, folder: int, depth: int) -> None:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
        elif depth < _DEPTH:
            with opened(name, folder) as below:
                self.empty(below, depth + 1)
            os.rmdir(name, dir_fd=folder)
        else:
            self._move_up(name, folder)

    def _move_up(self, name: str, folder: int) -> None:
        self._moved += 1
        self.count -= 1  # it will be met again
        os.rename(name, f".moved-{os.urandom(8).hex()}", src_dir_fd=folder, dst_dir_fd=self._top)


def _entries(folder: int) -> list[tuple[str, bool]]:
    with os.scandir(folder) as found:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]


@contextmanager
def opened(name: str, folder: int | None = None) -> Iterator[int]:
    handle = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)


# --- Size -------------------------------------------------------------------------------------------------------------


def written_bytes(folder: Path) -> int:
    """What the files below take on disk. What comes, goes or moves meanwhile may or may not be in it."""
    walk = _Walk(folder)
    try:
        while walk.on():
            pass
    except FileNotFoundError:  # the folder itself is gone
        pass
    finally:
        walk.close()
    return walk.total_bytes


class _Walk:
    """Goes through all folders with one of them open at a time."""

    def __init__(self, folder: Path) -> None:
        self._top = folder
        self._here = -1
        self._trail: list[tuple[str, tuple[int, int], list[str]]] = []  # name, identity, what is still to be seen there
        self.total_bytes = 0

    def on(self) -> bool:
        """One step; False when all was seen."""
        if self._here < 0:
            self._enter(os.open(self._top, _FOLDER), "")
        elif self._trail[-1][2]:
            name = self._trail[-1][2].pop()
            with suppress(OSError):  # gone, or a file by now
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
                    self.total_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
        self._trail.append((name, _identity(handle), below))

    def _leave(self) -> None:
        self._trail.pop()
        self._change_to(os.open("..", _FOLDER, dir_fd=self._here))
        if _identity(self._here) != self._trail[-1][1]:  # somebody moved it while we were inside
            self._find_back()

    def _find_back(self) -> None:
        """To the deepest folder of the trail that is still where it was."""
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
    about = os.fstat(handle)
    return about.st_dev, about.st_ino
