"""Removes untrusted directory trees of any depth.

Uses directory handles instead of paths and follows no links: processes inside may change the tree meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH = 64
"""Deeper folders are moved up before their removal: it bounds recursion and open files."""


def empty(folder: Path) -> int:
    """Empties a folder that no process changes any more; returns the number of entries removed. Raises: OSError."""
    with opened(str(folder)) as top:
        removal = _Removal(top)
        while removal.empty(top, 0):
            pass
    return removal.count


def remove(folder: Path) -> int:
    """Empties and removes a folder; returns the number of entries removed in it. Missing: 0. Raises: OSError."""
    try:
        count = empty(folder)
        os.rmdir(folder)
    except FileNotFoundError:
        return 0
    return count


class _Removal:
    def __init__(self, top: int) -> None:
        self._top = top
        self._moved = 0
        self.count = 0

    def empty(self, folder: int, depth: int) -> bool:
        """Empties a folder; whether folders were moved to the top, which must then be emptied once more."""
        before = self._moved
        for name, is_folder in _entries(folder):
            self.count += 1
            with suppress(FileNotFoundError):  # other processes may be removing it, too
                self._remove(name, is_folder, folder, depth)
        return self._moved > before

    def _remove(self, name: str, is_folder: bool, folder: int, depth: int) -> None:
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
        self.count -= 1  # it will be counted again at the top
        os.rename(name, f".moved-{os.urandom(8).hex()}", src_dir_fd=folder, dst_dir_fd=self._top)


def _entries(folder: int) -> list[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


@contextmanager
def opened(name: str, folder: int | None = None) -> Iterator[int]:
    handle = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)
