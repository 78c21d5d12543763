"""Copies what a running environment has written, safely: no path is trusted, no link followed.

Whatever runs inside may swap a folder for a link to a place of this host meanwhile: it must not be copied from there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from app.host.trees import opened

_DEPTH = 128
"""Folders below folders, of which each takes open files."""
_CHUNK_BYTES = 16 << 20


def copy(source: Path, target: Path, *, but: Collection[str] = (), go_on: Callable[[], None] = lambda: None) -> None:
    """Copy a folder of an overlay's: owners, modes, times, attributes, holes, and what stands for a deletion.

    but: names at its top that are left out. go_on: called again and again; it raises when the copy is not wanted any
    more. What comes or goes meanwhile may or may not be in the copy, and of what changes a part.

    Raises: OSError: also for more than `_DEPTH` folders below each other.
    """
    target.mkdir()
    with opened(str(source)) as origin, opened(str(target)) as place:
        _Copy(target, go_on).folder(origin, place, ".", frozenset(but))


@dataclass
class _Copy:
    top: Path
    go_on: Callable[[], None]
    known: dict[tuple[int, int], str] = field(default_factory=dict)  # files with several names, by where the first is

    def folder(self, source: int, target: int, path: str, but: frozenset[str] = frozenset()) -> None:
        if path.count("/") > _DEPTH:
            raise OSError(f"folders lie more than {_DEPTH} deep at {path[-100:]}")
        for name in os.listdir(source):
            if name not in but:
                self.go_on()
                with suppress(FileNotFoundError):  # gone since it was listed
                    self._entry(name, source, target, f"{path}/{name}")
        _dress(source, target)

    def _entry(self, name: str, source: int, target: int, path: str) -> None:
        about = os.stat(name, dir_fd=source, follow_symlinks=False)
        match stat.S_IFMT(about.st_mode):
            case stat.S_IFDIR:
                with opened(name, source) as below:
                    os.mkdir(name, 0o700, dir_fd=target)
                    with opened(name, target) as place:
                        self.folder(below, place, path)
            case stat.S_IFREG:
                self._file(name, source, target, path)
            case stat.S_IFLNK:
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                _own(name, target, about)
            case stat.S_IFCHR | stat.S_IFIFO | stat.S_IFSOCK if not about.st_rdev:  # character 0:0 is a deletion
                os.mknod(name, about.st_mode, dir_fd=target)
                _own(name, target, about)
                os.chmod(name, stat.S_IMODE(about.st_mode), dir_fd=target)

    def _file(self, name: str, source: int, target: int, path: str) -> None:
        with _file(name, os.O_RDONLY | os.O_NONBLOCK, source) as origin:
            about = os.fstat(origin)
            if not stat.S_ISREG(about.st_mode):  # since we looked
                return
            identity = about.st_dev, about.st_ino
            if about.st_nlink > 1 and identity in self.known:
                os.link(self.top / self.known[identity], name, dst_dir_fd=target, follow_symlinks=False)
                return
            if about.st_nlink > 1:
                self.known[identity] = path
            with _file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, target) as place:
                self._fill(origin, place, about.st_size)
                _dress(origin, place)

    def _fill(self, source: int, target: int, size_bytes: int) -> None:
        """Only what is there: a hole takes no room on the disk, whatever its size."""
        os.ftruncate(target, size_bytes)
        at = 0
        while (found := _data(source, at)) is not None and found[0] < size_bytes:
            at, end = found[0], min(found[1], size_bytes)
            while at < end:
                self.go_on()
                copied = os.copy_file_range(source, target, min(end - at, _CHUNK_BYTES), at, at)
                if not copied:  # it has become shorter
                    return
                at += copied


def _data(handle: int, at: int) -> tuple[int, int] | None:
    """Where the next bytes begin and end that are no hole; None: there are no more."""
    try:
        begin = os.lseek(handle, at, os.SEEK_DATA)
        return begin, os.lseek(handle, begin, os.SEEK_HOLE)
    except OSError:
        return None


@contextmanager
def _file(name: str, how: int, folder: int) -> Iterator[int]:
    handle = os.open(name, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)


def _own(name: str, folder: int, about: os.stat_result) -> None:
    os.chown(name, about.st_uid, about.st_gid, dir_fd=folder, follow_symlinks=False)
    os.utime(name, ns=(about.st_atime_ns, about.st_mtime_ns), dir_fd=folder, follow_symlinks=False)


def _dress(source: int, target: int) -> None:
    """Owner first: changing it takes bits of the mode and capabilities away."""
    about = os.fstat(source)
    os.fchown(target, about.st_uid, about.st_gid)
    os.fchmod(target, stat.S_IMODE(about.st_mode))
    for name in os.listxattr(source):
        os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
