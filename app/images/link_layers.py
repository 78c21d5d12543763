"""Links the files of an engine's layer folder into the store."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.host import kernel, mount_namespace

_OPAQUE = "trusted.overlay.opaque"
_ENTANGLED = ("trusted.overlay.redirect", "trusted.overlay.metacopy")
"""Attributes of folders and files that are only complete together with the engine's other layers."""
_NOT_LINKED = (errno.EXDEV, errno.EMLINK, errno.EPERM)
"""Errors: another file system or mount; the maximum number of links; a file without support for links."""


class Entangled(Exception):
    """Raised for a layer that is incomplete alone, or whose files cannot be linked: it must be exported."""


def take(source: Path, target: Path) -> int:
    """Links `source` into the empty `target`. Returns its bytes. Raises: OSError: also if it is removed; Entangled."""
    return mount_namespace.apart(lambda: _unpacked(source, target), needs=target)


def _unpacked(source: Path, target: Path) -> int:
    _uncover(source)
    return _folder(str(source), str(target))


def _folder(source: str, target: str) -> int:
    size_bytes = 0
    with os.scandir(source) as entries:
        for entry in entries:
            about = entry.stat(follow_symlinks=False)
            place = f"{target}/{entry.name}"
            if stat.S_ISDIR(about.st_mode):
                os.mkdir(place)
                size_bytes += _folder(entry.path, place)
            elif not _is_device(about):
                size_bytes += _file(entry.path, place, about)
    _dress(source, target, os.stat(source))
    return size_bytes


def _file(source: str, target: str, about: os.stat_result) -> int:
    if stat.S_ISREG(about.st_mode):
        _refuse_entangled(source)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NOT_LINKED:
            raise
        raise Entangled(f"{source} cannot be linked: {error.strerror}") from error
    return about.st_size if stat.S_ISREG(about.st_mode) else 0


def _is_device(about: os.stat_result) -> bool:
    """Whether a file is a device, except the one by which overlayfs marks a deletion."""
    return stat.S_ISBLK(about.st_mode) or (stat.S_ISCHR(about.st_mode) and about.st_rdev != 0)


def _dress(source: str, target: str, about: os.stat_result) -> None:
    """Copies owner, mode, attributes and times. Owner first: changing it clears bits of the mode and capabilities."""
    os.chown(target, about.st_uid, about.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(about.st_mode):
        os.chmod(target, stat.S_IMODE(about.st_mode))
    _refuse_entangled(source)
    for name in os.listxattr(source, follow_symlinks=False):
        if name == _OPAQUE or not name.startswith("trusted.overlay."):
            os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns), follow_symlinks=False)


def _refuse_entangled(path: str) -> None:
    if any(name in _ENTANGLED for name in os.listxattr(path, follow_symlinks=False)):
        raise Entangled(f"{path} refers to other layers")


@dataclass(frozen=True)
class _Mount:
    id: str
    parent: str
    device: str
    root: str  # folder of the file system that is mounted
    where: str


def _uncover(folder: Path) -> None:
    """Unmounts what the engine has mounted over its own folder: the kernel links within one mount only.

    Only folders that were mounted onto themselves; a separate file system (a disk for data) stays mounted.
    """
    mounts = list(_mounts())
    by_id = {mount.id: mount for mount in mounts}
    for mount in reversed([one for one in mounts if one.where != "/" and folder.is_relative_to(one.where)]):
        below = by_id.get(mount.parent)
        if below is None or not _is_onto_itself(mount, below):
            return  # the folder is not on the mount below this one
        kernel.unmount(mount.where)


def _is_onto_itself(mount: _Mount, below: _Mount) -> bool:
    covered = os.path.normpath(os.path.join(below.root, os.path.relpath(mount.where, below.where)))
    return (mount.device, os.path.normpath(mount.root)) == (below.device, covered)


def _mounts() -> Iterator[_Mount]:
    for line in Path("/proc/thread-self/mountinfo").read_text().splitlines():
        number, parent, device, root, where = line.split()[:5]
        yield _Mount(number, parent, device, _plain(root), _plain(where))


def _plain(path: str) -> str:
    return path.encode().decode("unicode_escape")
