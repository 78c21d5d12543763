"""Copies of the folders of local environments: snapshots/local/ID of a home, with a file that says whose each is.

Files that name their own place (scripts of a Python environment do) name the place that they were copied from.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from app.environments.contract import Snapshot, Tags
from app.environments.runtimes.local.folder import OWNER, copy, remove
from app.errors import EnvironmentFailed
from app.host.disk import disk_named

KIND = "local"
_COPY_S = 600.0
_ROOT = "root"


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy that is there, or that somebody was killed in the middle of."""

    id: str
    labels: dict[str, str]
    made_unix_s: float


class Snapshots:
    """Those of one home."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "snapshots" / "local"

    def take(self, root: Path, tags: Tags) -> Snapshot:
        """Raises: EnvironmentFailed, DiskFull; then nothing is left."""
        identity = uuid4().hex
        place = self._folder / identity
        try:
            with disk_named("keep a snapshot"):
                place.mkdir(parents=True)
                (place / OWNER).write_text(json.dumps(tags.labels()))
                copy(root, place / f".{_ROOT}", time.monotonic() + _COPY_S)
                os.rename(place / f".{_ROOT}", place / _ROOT)  # whole, or not there
        except OSError as error:
            remove(place)
            raise EnvironmentFailed(f"the files could not be copied to {place}: {error}.") from error
        except BaseException:
            remove(place)
            raise
        return Snapshot(KIND, identity, "")

    def root_of(self, snapshot: Snapshot) -> Path:
        """What to copy. Raises: EnvironmentFailed: it is gone, or another kind's."""
        if snapshot.kind != KIND:
            raise EnvironmentFailed(f"expected a snapshot of the kind {KIND!r}, found {snapshot.kind!r}.")
        root = self._folder / snapshot.id / _ROOT
        if not root.is_dir():
            raise EnvironmentFailed(f"snapshot {snapshot.id} is gone: it was removed, or its deadline has passed.")
        return root

    def remove(self, identity: str) -> None:
        remove(self._folder / identity)

    def kept(self) -> Iterator[Kept]:
        """All of the home, whoever's they are; one whose owner is not readable is left out."""
        for file in self._folder.glob(f"*/{OWNER}"):
            try:
                labels: dict[str, str] = json.loads(file.read_text())
                yield Kept(file.parent.name, labels, file.stat().st_mtime)
            except (OSError, ValueError):  # going, or half written
                continue
