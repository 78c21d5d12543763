"""Stores names, last use and origin of this host's images.

The engine stores none. Files below `home`/cache/images, shared by all processes of the host without a lock: one
per image and key, whose time of change is the time of last use.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from app.errors import ImageUnavailable, StationError
from app.images.layer_store import ImageStore, write_whole
from app.images.references import short
from app.settings import Settings

_RETRY_S = 0.02


@dataclass(slots=True)
class ImageEntry:
    """Metadata of an image. `names`: those that MegaFlow pulled or tagged; empty when it was here before."""

    image_id: str
    keys: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    used_at: float = 0.0

    @property
    def ours(self) -> bool:
        """Whether MegaFlow brought it here. Only then may it be evicted without a person's command."""
        return bool(self.names)


class ImageMetadata:
    """The records of one host and installation."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.home / "cache" / "images"
        self._locks = settings.home / "run" / "slots"

    def used(self, image_id: str, key: str) -> None:
        """Records that a task uses the image now."""
        file = self._file(image_id, key)
        try:
            os.utime(file)
        except FileNotFoundError:
            write_whole(file, json.dumps({"image": image_id, "key": key, "names": []}))

    def made(self, image_id: str, key: str, names: Sequence[str]) -> None:
        """Records that MegaFlow pulled or built the image, under these names."""
        write_whole(self._file(image_id, key), json.dumps({"image": image_id, "key": key, "names": list(names)}))

    def entry(self, image_id: str) -> ImageEntry:
        """Returns the metadata of one image."""
        return self._read(f"{_hex(image_id)}.*.json").get(image_id) or ImageEntry(image_id)

    def entries(self) -> dict[str, ImageEntry]:
        """Returns all records by image id; some may be of removed images."""
        return self._read("*.json")

    def change_marker(self) -> frozenset[str]:
        """Returns a value that changes whenever an image comes or goes; cheap."""
        try:
            return frozenset(name for name in os.listdir(self._folder) if name.endswith(".json"))
        except FileNotFoundError:
            return frozenset()

    def _read(self, pattern: str) -> dict[str, ImageEntry]:
        entries: dict[str, ImageEntry] = {}
        for file in self._folder.glob(pattern):
            with suppress(OSError, ValueError, KeyError):  # just removed
                record, used_at = json.loads(file.read_text()), file.stat().st_mtime
                entry = entries.setdefault(record["image"], ImageEntry(record["image"]))
                entry.keys.add(record["key"])
                entry.names.update(record["names"])
                entry.used_at = max(entry.used_at, used_at)
        return entries

    def forget(self, image_id: str) -> None:
        """Removes the records of an image that is not on this host any more."""
        for file in self._folder.glob(f"{_hex(image_id)}.*"):
            file.unlink(missing_ok=True)

    def note_fit(self, image_id: str) -> None:
        """Records that the image has what an environment needs. Valid for ever, as its id is its content."""
        write_whole(self._folder / f"{_hex(image_id)}.fit", json.dumps(True))

    def fit(self, image_id: str) -> bool:
        """Whether `note_fit` recorded the image."""
        return (self._folder / f"{_hex(image_id)}.fit").exists()

    def note_queue(self, keys: Sequence[str]) -> None:
        """Records the keys that the queue will need, soonest first, for processes that have to make room."""
        write_whole(self._folder / "queue", json.dumps(list(keys)))

    def queue(self) -> list[str]:
        """Returns the keys as last recorded; empty without a record."""
        try:
            return [str(key) for key in json.loads((self._folder / "queue").read_text())]
        except (OSError, ValueError):
            return []

    @contextmanager
    def pinned(self, key: str, *, timeout_s: float) -> Iterator[None]:
        """Prevents, for the block, that a process on this host evicts the image of `key`. Raises: TimeoutError."""
        with self._locked(key, fcntl.LOCK_SH, time.monotonic() + timeout_s):
            yield

    @contextmanager
    def alone(self, keys: Sequence[str]) -> Iterator[bool]:
        """Yields whether none of these keys is pinned. If so, none can be pinned before the block ends."""
        with ExitStack() as locks:
            try:
                for key in sorted(keys):
                    locks.enter_context(self._locked(key, fcntl.LOCK_EX, 0.0))
                free = True
            except TimeoutError:
                free = False
            yield free

    @contextmanager
    def _locked(self, key: str, kind: int, deadline: float) -> Iterator[None]:
        self._locks.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._locks / f"keep-{short(key)}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _try(handle, kind):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"image {key} is being removed or kept by others")
                time.sleep(_RETRY_S)
            yield
        finally:
            os.close(handle)

    def _file(self, image_id: str, key: str) -> Path:
        return self._folder / f"{_hex(image_id)}.{short(key)}.json"


def _try(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _hex(image_id: str) -> str:
    return image_id.removeprefix("sha256:")


log = structlog.get_logger()

_BELIEVED_S = 60.0
"""Time for which the engine's list is reused without a change by MegaFlow: other programs pull and remove, too."""


class ImageChanges:
    """Reads the metadata, the engine and the unpacked images of one home. For one thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._book = ImageMetadata(settings)
        self._marks: frozenset[str] | None = None
        self._keys: frozenset[str] = frozenset()
        self._looked_at = 0.0  # monotonic seconds

    def here(self) -> frozenset[str]:
        """Returns the keys of the images that are here."""
        marks = self._book.change_marker() | ImageStore(self._settings.home.resolve()).change_marker()
        if marks != self._marks or time.monotonic() - self._looked_at > _BELIEVED_S:
            self._keys = self._look()
            self._marks, self._looked_at = marks, time.monotonic()
        return self._keys

    def _look(self) -> frozenset[str]:
        """Reads all images of an engine that answers; without one, the unpacked images are all there is."""
        listed, known = self._listed(), self._book.entries().items()
        if listed is None:
            here = ImageStore(self._settings.home.resolve()).references()
            ids = set(here.values())
            return frozenset(here).union(*(entry.keys for image_id, entry in known if image_id in ids))
        return frozenset(
            {key for image_id, entry in known if image_id in listed for key in entry.keys}.union(*listed.values())
        )

    def _listed(self) -> dict[str, set[str]] | None:
        try:
            from app.host.engine import engine_of  # the client is not installed everywhere

            engine = engine_of(self._settings)
            with engine.named("list images", ImageUnavailable):
                images = engine.api.images()
        except StationError as error:
            log.debug("images.no_engine", reason=str(error))
            return None
        return {image["Id"]: _names(image) for image in images}


def _names(image: dict[str, Any]) -> set[str]:
    given = (*(image.get("RepoTags") or ()), *(image.get("RepoDigests") or ()))
    return {name for name in given if "<none>" not in name}
