"""Unpacks a layer's tar into a folder for overlayfs: owners, modes, hard links, capabilities, deletions.

Nothing of a layer reaches outside of its folder, whatever links it has: every name is resolved as if that folder
were the root.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import posixpath
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.errors import ImageUnavailable, ImageUnfit
from app.host import kernel

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_ATTRIBUTE = "SCHILY.xattr."
_FOLDER = os.O_PATH | os.O_DIRECTORY
_CHUNK_BYTES = 1 << 20
_BROKEN = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EPERM, errno.EINVAL, errno.EEXIST}
"""Errors that a name, an owner or a link of a layer can cause."""
_NO_NAMES = ("", ".", "..")
"""Names of a folder itself or of its parent: nothing in a folder has them."""


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for unpacking a layer: monotonic seconds, and bytes of its files together."""

    deadline: float = math.inf
    most_bytes: float = math.inf

    def check(self, size_bytes: int) -> None:
        """Raises: ImageUnavailable: the time is over; ImageUnfit: these are too many."""
        if time.monotonic() > self.deadline:
            raise ImageUnavailable("a layer could not be unpacked within the time that this task allows for its image.")
        if size_bytes > self.most_bytes:
            raise ImageUnfit(f"a layer unpacks to more than {self.most_bytes:,} bytes: many times its size.")


class Digesting:
    """A stream that computes the sha256 of what is read from it."""

    def __init__(self, source: Readable, bounds: Bounds = Bounds()) -> None:
        self._source = source
        self._bounds = bounds
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        self.size_bytes += len(data)
        self._bounds.check(self.size_bytes)
        return data

    def finish(self) -> str:
        """Reads to the end. Returns `sha256:…` of everything."""
        while self.read(_CHUNK_BYTES):
            pass
        return f"sha256:{self._hash.hexdigest()}"


def unpack(stream: Readable, folder: Path, bounds: Bounds = Bounds()) -> int:
    """Unpacks an uncompressed layer into the empty `folder`. Returns the bytes of its files.

    Raises: ImageUnavailable: it is no layer, or takes too long; ImageUnfit: it has too many bytes; OSError.
    """
    root = os.open(folder, _FOLDER)
    try:
        with _Unpacking(root, bounds) as work, _read(stream) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined] # else it stores every member
                work.take(tar, member)
            return work.size_bytes
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise ImageUnavailable(f"a layer is damaged: {error}.") from error
    except OSError as error:
        if error.errno in _BROKEN:
            raise ImageUnavailable(f"a layer is damaged: {error}.") from error
        raise
    finally:
        os.close(root)


@contextmanager
def _read(stream: Readable) -> Iterator[tarfile.TarFile]:
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK_BYTES) as tar:  # type: ignore[call-overload]
        yield tar


class _Unpacking:
    def __init__(self, root: int, bounds: Bounds) -> None:
        self._root = root
        self._bounds = bounds
        self._parent: tuple[str, int] | None = (
            None  # the folder of the last member, open: members come folder by folder
        )
        self._times: list[tuple[str, int]] = []
        self.size_bytes = 0

    def __enter__(self) -> _Unpacking:
        return self

    def __exit__(self, *failure: object) -> None:
        self._forget_parent()
        if failure[0] is None:
            for path, time_ns in reversed(self._times):  # a folder's time changes with what is put into it
                with suppress(OSError), self._opened(path) as handle:
                    os.utime(f"/proc/self/fd/{handle}", ns=(time_ns, time_ns))

    def take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if member.isreg():
            self.size_bytes += member.size
        self._bounds.check(self.size_bytes)
        path = posixpath.normpath("/" + member.name).lstrip("/")
        folder, name = posixpath.split(path)
        if not name:
            self._dress_folder("", member)
        elif name == _OPAQUE:
            with self._opened(folder) as handle:
                os.setxattr(f"/proc/self/fd/{handle}", "trusted.overlay.opaque", b"y")
        elif name.startswith(_WHITEOUT * 2):
            return  # metadata of an older file system, without meaning here
        elif name.startswith(_WHITEOUT):
            self._delete(folder, _deleted(member, name))
        else:
            self._make(tar, member, path, folder, name)

    def _make(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, folder: str, name: str) -> None:
        parent = self._open_parent(folder)
        if member.isdir():
            self._make_folder(parent, name, path, member)
            return
        self._clear(parent, name)
        if member.isreg():
            self._make_file(tar, parent, name, member)
        elif member.islnk():
            self._make_hard_link(parent, name, member)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            self._date(parent, name, member)
        # No pipes. No devices: a container cannot make one, and a host without version 1 of cgroups could not forbid
        # its use.

    def _make_file(self, tar: tarfile.TarFile, parent: int, name: str, member: tarfile.TarInfo) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            source = tar.extractfile(member)
            while source is not None and (data := source.read(_CHUNK_BYTES)):
                _write_all(handle, data)
            os.fchown(handle, member.uid, member.gid)
            os.fchmod(handle, stat.S_IMODE(member.mode))
            self._attributes(handle, member)
            os.utime(handle, ns=_times(member))
        finally:
            os.close(handle)

    def _make_folder(self, parent: int, name: str, path: str, member: tarfile.TarInfo) -> None:
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=parent)
                os.mkdir(name, 0o755, dir_fd=parent)
        self._dress_folder(path, member)

    def _dress_folder(self, path: str, member: tarfile.TarInfo) -> None:
        with self._opened(path) as handle:
            place = f"/proc/self/fd/{handle}"
            os.chown(place, member.uid, member.gid)
            os.chmod(place, stat.S_IMODE(member.mode))
            self._attributes(place, member)
        self._times.append((path, _times(member)[1]))

    def _make_hard_link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        folder, target = posixpath.split(posixpath.normpath("/" + member.linkname).lstrip("/"))
        try:
            with self._opened(folder) as source:
                os.link(target, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError as error:
            why = f"{member.name} is to be another name of {member.linkname}, which it has not"
            raise ImageUnavailable(f"a layer is damaged: {why}.") from error

    def _delete(self, folder: str, name: str) -> None:
        """Marks a name of lower layers as deleted: overlayfs recognises it by a special device."""
        parent = self._open_parent(folder)
        self._clear(parent, name)
        os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=parent)

    def _open_parent(self, folder: str) -> int:
        if self._parent is None or self._parent[0] != folder:
            self._forget_parent()
            kernel.make_folders_inside(self._root, folder)
            self._parent = (folder, kernel.open_inside(self._root, folder, _FOLDER))
        return self._parent[1]

    def _forget_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        kernel.make_folders_inside(self._root, folder)
        handle = kernel.open_inside(self._root, folder, _FOLDER)
        try:
            yield handle
        finally:
            os.close(handle)

    def _clear(self, parent: int, name: str) -> None:
        """Removes an earlier member of the layer, as a later one replaces it."""
        if name in _NO_NAMES:
            raise ImageUnavailable(f"a layer is damaged: it replaces {name!r}.")
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=parent)

    def _date(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        os.utime(name, ns=_times(member), dir_fd=parent, follow_symlinks=False)

    def _attributes(self, place: int | str, member: tarfile.TarInfo) -> None:
        for key, value in member.pax_headers.items():
            name = key.removeprefix(_ATTRIBUTE)
            if name != key and (name == "security.capability" or name.startswith("user.")):
                with suppress(OSError):  # a file system without extended attributes
                    os.setxattr(place, name, value.encode("utf-8", "surrogateescape"))


def _deleted(member: tarfile.TarInfo, name: str) -> str:
    """Returns the name that a deletion is about; never one that leads elsewhere."""
    deleted = name.removeprefix(_WHITEOUT)
    if deleted in _NO_NAMES:
        raise ImageUnavailable(f"a layer is damaged: it deletes {member.name!r}.")
    return deleted


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    time_ns = max(0, int(float(member.mtime) * 1e9))
    return time_ns, time_ns


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


Fill = Callable[[Path], int]
"""Puts a layer into an empty folder and returns its bytes."""


def unpack_layer(stream: Readable, expected: str, folder: Path, bounds: Bounds = Bounds()) -> int:
    """Unpacks an uncompressed tar whose digest must be `expected` into the empty `folder`. Raises: as `unpack`."""
    digesting = Digesting(stream, bounds)
    size_bytes = unpack(digesting, folder, bounds)
    digest = digesting.finish()
    if digest != expected:
        raise ImageUnavailable(f"a layer is damaged: expected {expected}, found {digest}.")
    return size_bytes
