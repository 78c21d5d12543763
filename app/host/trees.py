"""Removes untrusted directory trees of any depth.

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


def empty(folder: Path) -> int:
    """Remove what is in a folder that nothing changes any more; how many files and folders. Raises: OSError."""
    with opened(str(folder)) as top:
        removal = _Removal(top)
        while removal.empty(top, 0):
            pass
    return removal.count


def remove(folder: Path) -> int:
    """`empty` it, and remove the folder itself. Not there: fine. Raises: OSError."""
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
        """Whether something was moved to the top, which must be emptied once more."""
        before = self._moved
        for name, is_folder in _entries(folder):
            self.count += 1
            with suppress(FileNotFoundError):  # others may be removing it, too
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
