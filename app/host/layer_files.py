"""Restores files of a stopped container to the image's version, by removing them from the container's own layer.

Names and links in the layer are hostile: links are never followed, and files of the layer are not executed or trusted.
The kernel allows changes to an overlay's upper folder while it is not mounted.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app.host import trees
from app.models.shell import DecideFile, FileAction

_OPAQUE = "trusted.overlay.opaque"
_READ_BYTES = 64 << 10
_DEPTH = 200
_LONGEST = 3000
"""Limits: deeper folders and longer paths are not read. Such a folder is suspect, as a link may lead to it."""
_COARSE = 5
"""CLOCK_REALTIME_COARSE: the clock of file times, which is constant between two ticks of the kernel."""
_LOOK_S = 0.001
_CLOCK_S = 1.0
"""Longest wait for a clock that was set back."""


@dataclass(frozen=True, slots=True)
class LayerFile:
    """Entry of a container's own layer; see `app.models.shell.ChangedFile`."""

    path: str
    place: Path
    lower: Sequence[Path]
    is_cut_off: bool = False
    """Whether it is a folder whose entries are not read."""

    @property
    def in_image(self) -> bool:
        return self.image_has(self.path)

    @property
    def deleted(self) -> bool:
        with suppress(OSError):
            status = os.lstat(self.place)
            return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
        return False

    def image_has(self, path: str) -> bool:
        return image_has(self.lower, path)

    @property
    def removable(self) -> bool:
        return True

    @property
    def target(self) -> str:
        with suppress(OSError):
            return os.readlink(self.place)
        return ""

    def read(self) -> bytes | None:
        if self.place.is_symlink():
            return None
        with suppress(OSError):
            handle = os.open(self.place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    return os.read(handle, _READ_BYTES)
            finally:
                os.close(handle)
        return b""


def time_between_changes_ns() -> int:
    """Returns a Unix time in ns after all file changes so far, and before all later ones. Takes a tick, about 4 ms."""
    now, give_up = time.time_ns(), time.monotonic() + _CLOCK_S
    while time.clock_gettime_ns(_COARSE) <= now and time.monotonic() < give_up:
        time.sleep(_LOOK_S)
    return now


def put_back(
    upper: Path, lower: Sequence[Path], decide: DecideFile, *, since_ns: int = 0
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Calls `decide` for each entry; returns the restored paths and the suspect paths, as printable text.

    upper: the container's own layer, not mounted; lower: the image's, topmost first. since_ns: earlier changes are
    ignored, see `time_between_changes_ns`. Processes inside cannot set the time of a change (ctime).
    Raises: OSError.
    """
    paths: dict[FileAction, list[str]] = {action: [] for action in FileAction}
    for file in _entries(upper, "", lower):
        if os.lstat(file.place).st_ctime_ns <= since_ns:
            continue
        action = FileAction.SUSPECT if file.is_cut_off else decide(file)
        if action is FileAction.PUT_BACK:
            _remove(file.place)
        paths[action].append(file.path.encode("utf-8", "backslashreplace").decode())
    return tuple(paths[FileAction.PUT_BACK]), tuple(paths[FileAction.SUSPECT])


def _entries(folder: Path, inside: str, lower: Sequence[Path]) -> Iterator[LayerFile]:
    """Yields all entries below: an opaque folder as a file before its entries, and an unread folder as cut off."""
    with os.scandir(folder) as listing:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing]
    for name, is_folder in entries:
        file = LayerFile(f"{inside}/{name}", folder / name, lower)
        if not is_folder or (_is_opaque(file.place) and file.in_image):
            yield file
        is_near = file.path.count("/") < _DEPTH and len(os.fsencode(file.place)) < _LONGEST
        if is_folder and not is_near:
            yield replace(file, is_cut_off=True)
        elif is_folder and file.place.is_dir():
            yield from _entries(file.place, file.path, lower)


def _is_opaque(folder: Path) -> bool:
    with suppress(OSError):
        return os.getxattr(folder, _OPAQUE, follow_symlinks=False) == b"y"
    return False


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        trees.remove(place)
    else:
        place.unlink()


def image_has(lower: Sequence[Path], path: str) -> bool:
    """Whether an image's layers, topmost first, have a path; a deletion in one layer hides lower layers."""
    parts = [part for part in path.split("/") if part]
    for layer in lower:
        place = layer
        for index, part in enumerate(parts):
            place = place / part
            try:
                mode = os.lstat(place)
            except OSError:
                break
            if stat.S_ISCHR(mode.st_mode) and mode.st_rdev == 0:
                return False
            if index == len(parts) - 1:
                return True
            if stat.S_ISLNK(mode.st_mode):  # never followed: its target is checked under its own path
                break
    return False
