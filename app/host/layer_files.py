"""Puts files of a stopped container back to how its image has them, by removing them from its own layer.

Names and links in the layer are hostile: nothing is reached by a link, and no file of the layer is executed or trusted.
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
"""Further down, and at longer paths, nothing is looked at: a folder there is suspect, as a link may lead to it."""
_COARSE = 5
"""CLOCK_REALTIME_COARSE: the clock of the times that files get, which stands still between two ticks of the kernel."""
_LOOK_S = 0.001
_CLOCK_S = 1.0
"""Nothing waits longer for a clock that was set back."""


@dataclass(frozen=True, slots=True)
class LayerFile:
    """One entry of a container's own layer; see `app.models.shell.ChangedFile`."""

    path: str
    place: Path
    lower: Sequence[Path]
    is_cut_off: bool = False
    """A folder of which nothing is looked at."""

    @property
    def in_image(self) -> bool:
        return self.image_has(self.path)

    @property
    def deleted(self) -> bool:
        with suppress(OSError):
            found = os.lstat(self.place)
            return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
        return False

    def image_has(self, path: str) -> bool:
        return image_has(self.lower, path)

    @property
    def removable(self) -> bool:
        return True

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
    """A Unix time in ns after all changes of files until now, and before all that follow. Takes a tick, some 4 ms."""
    now, give_up = time.time_ns(), time.monotonic() + _CLOCK_S
    while time.clock_gettime_ns(_COARSE) <= now and time.monotonic() < give_up:
        time.sleep(_LOOK_S)
    return now


def put_back(
    upper: Path, lower: Sequence[Path], decide: DecideFile, *, since_ns: int = 0
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Have `decide` look at each entry; the paths that were put back, and those that are suspect, in printable text.

    upper: the container's own layer, not mounted; lower: the image's, topmost first. since_ns: what
    was changed before is left alone, see `time_between_changes_ns`: no process inside can set the time of a change.
    Raises: OSError.
    """
    found: dict[FileAction, list[str]] = {action: [] for action in FileAction}
    for file in _entries(upper, "", lower):
        if os.lstat(file.place).st_ctime_ns <= since_ns:
            continue
        action = FileAction.SUSPECT if file.is_cut_off else decide(file)
        if action is FileAction.PUT_BACK:
            _remove(file.place)
        found[action].append(file.path.encode("utf-8", "backslashreplace").decode())
    return tuple(found[FileAction.PUT_BACK]), tuple(found[FileAction.SUSPECT])


def _entries(folder: Path, inside: str, lower: Sequence[Path]) -> Iterator[LayerFile]:
    """Every entry below; a folder that was made opaque is told as a file before what is in it, one cut off as such."""
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
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
    """Whether an image's layers have a path, topmost first; a deletion in one hides those below."""
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
            if stat.S_ISLNK(mode.st_mode):  # its target is looked at where it is named, never followed here
                break
    return False
