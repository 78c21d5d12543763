"""Finds files of a pod that differ from its image, by file lists of the pod and of a fresh one of that image.

A pod's own layer is not visible from outside, and nothing can be removed from it without its programs. So, as on an
engine elsewhere (`app.host.unseen_layer`), hardly anything is restored; other changes are suspect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from app.environments.session.protocol import FileListing
from app.host.unseen_layer import HARMLESS
from app.models.shell import DecideFile, FileAction

Read = Callable[[str], bytes | None]
"""Reads a file's first 64 KiB in the pod."""


@dataclass(frozen=True, slots=True)
class PodFile:
    """A changed file; see `app.models.shell.ChangedFile`."""

    path: str
    deleted: bool
    image: FileListing
    read_now: Read

    @property
    def in_image(self) -> bool:
        return self.path in self.image.files

    @property
    def removable(self) -> bool:
        return False

    @property
    def target(self) -> str:
        return ""

    def image_has(self, path: str) -> bool:
        return path in self.image.files

    def read(self) -> bytes | None:
        return b"" if self.deleted else self.read_now(self.path)


def changed(now: FileListing, image: FileListing, since_ns: int) -> Iterator[tuple[str, bool]]:
    """Yields paths that changed since `since_ns`, and whether each is deleted; of folders only deleted ones.

    The kernel sets the times of changes, and nothing inside can set them back. A folder that was moved in brings old
    files with it: all files below a new folder are new.
    """
    new = {path for path, (kind, at) in now.files.items() if kind == "d" and at > since_ns and path not in image.files}
    for path, (kind, at) in now.files.items():
        if kind != "d" and (at > since_ns or any(str(folder) in new for folder in PurePosixPath(path).parents)):
            yield path, False
    for path in image.files:
        if path not in now.files:
            yield path, True


def judged(
    now: FileListing, image: FileListing, since_ns: int, decide: DecideFile, read: Read
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Calls `decide` for each changed file. Returns the paths to empty, and the suspect ones."""
    emptied, suspect = [], []
    for path, deleted in changed(now, image, since_ns):
        action = decide(PodFile(path, deleted, image, read))
        if action is FileAction.KEEP:
            continue
        if action is FileAction.SUSPECT or not HARMLESS.search(path):
            suspect.append(path)
        elif not deleted:
            emptied.append(path)
    return tuple(emptied), tuple(suspect)
