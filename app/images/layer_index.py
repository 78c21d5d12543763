"""Lists the images of a host without an engine, and the results of set-ups; removes unpacked images."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from app.errors import ImageUnavailable
from app.host.engine import url_of
from app.host.environment_records import Records
from app.images.eviction import ImageLayer
from app.images.image_index import Disk, Here, disk_at
from app.images.layer_store import ImageStore, StoredImageEntry
from app.images.metadata import ImageEntry, ImageMetadata
from app.settings import Settings

log = structlog.get_logger()

_SET_UP = "setup:"
"""Prefix of the id of a set-up's result."""


class Unpacked:
    """Implements `ImageIndex`. MegaFlow brought all images here, except those of an engine that no longer exists."""

    def __init__(self, settings: Settings, book: ImageMetadata) -> None:
        self._settings = settings
        self._home = settings.home.resolve()
        self._book = book

    @property
    def _store(self) -> ImageStore:
        return ImageStore(self._home)

    @property
    def is_all(self) -> bool:
        return not Path(urlsplit(url_of(self._settings)).path).exists()

    def images(self) -> list[Here]:
        store, entries = self._store, self._book.entries()
        names = defaultdict(list)
        for reference, image_id in store.references().items():
            names[image_id].append(reference)
        users = users_of(self._home)
        listed = [
            self._image(store, one, entries.get(one.image.id), names[one.image.id], users[one.image.id])
            for one in store.listed()
            if one.snapshot is None
        ]
        return [*listed, *self.set_ups()]

    def set_ups(self) -> list[Here]:
        """Returns set-ups' results, each with its own layer only. Removing their image removes them and its layers."""
        store, entries = self._store, self._book.entries()
        snapshots = [one for one in store.listed() if one.snapshot is not None]
        in_use = self._layers_in_use() if snapshots else set()
        return [self._set_up(store, one, entries.get(one.image.id), in_use) for one in snapshots]

    @staticmethod
    def is_set_up(image: Here) -> bool:
        """Whether the image is one of `set_ups`."""
        return image.id.startswith(_SET_UP)

    def disk(self) -> Disk | None:
        return disk_at(self._store.layers)

    def remove(self, image: Here) -> bool:
        store = self._store
        if not self.is_set_up(image):
            forget(self._home, image.id)
            return store.image(image.id) is None
        name = image.id.removeprefix(_SET_UP)
        if any(one.snapshot == name and one.used_at > image.used_at for one in store.listed()):
            return False  # used since the listing
        store.remove_setup(name, keep=self._layers_in_use)
        return all(one.snapshot != name for one in store.listed())

    def tidy(self) -> None:
        tidy(self._home)

    def _layers_in_use(self) -> set[str]:
        try:
            return Records(self._home).layers_in_use()
        except OSError as error:
            raise ImageUnavailable(f"which images are in use cannot be told: {error}; none goes. Try again.") from error

    def _image(
        self, store: ImageStore, one: StoredImageEntry, entry: ImageEntry | None, names: Collection[str], users: int
    ) -> Here:
        ours = entry is None or entry.ours  # an image that an engine had before is always in the metadata
        known = entry or ImageEntry(one.image.id)
        layers = _layers(store, one.image.layers)
        return Here(
            id=one.image.id,
            keys=frozenset(known.keys),
            layers=layers,
            used_at=max(one.used_at, known.used_at),
            names=tuple(sorted({*names, *known.names})),
            size_bytes=sum(layer.size_bytes for layer in layers),
            ours=ours,
            containers=users,
            pinned=not {self._settings.base_image, self._settings.worker_image}.isdisjoint(names),
        )

    def _set_up(
        self, store: ImageStore, one: StoredImageEntry, entry: ImageEntry | None, in_use: Collection[str]
    ) -> Here:
        name, top = f"{_SET_UP}{one.snapshot}", one.image.layers[-1:]
        keys = frozenset(entry.keys) if entry else frozenset()
        return Here(
            id=name,
            keys=keys,
            layers=_layers(store, top),
            used_at=one.used_at,
            derived=True,
            names=(name[:24],),
            size_bytes=store.size_bytes(top),
            ours=True,
            containers=int(top[0] in in_use),
        )


def _layers(store: ImageStore, names: Sequence[str]) -> tuple[ImageLayer, ...]:
    return tuple(ImageLayer(name, store.size_bytes([name])) for name in names)


def users_of(home: Path) -> Counter[str]:
    """Counts environments without an engine by the id of their image."""
    return Counter(record.image_id for record in Records(home.resolve()).all())


def forget(home: Path, image_id: str) -> int:
    """Removes the unpacked image. Returns the freed bytes; 0 when an environment uses it."""
    where = home.resolve()
    try:
        return ImageStore(where).remove(image_id, keep=Records(where).layers_in_use)
    except OSError as error:  # unknown what is in use: nothing is removed
        log.warning("unpacked.not_removed", image=image_id, reason=str(error))
        return 0


def tidy(home: Path) -> int:
    """Removes half-unpacked remains of killed processes, and layers of no image. Returns the freed bytes."""
    where = home.resolve()
    try:
        return ImageStore(where).tidy(keep=Records(where).layers_in_use)
    except OSError as error:
        log.warning("unpacked.not_tidied", reason=str(error))
        return 0
