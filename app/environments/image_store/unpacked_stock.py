"""The images of a host without an engine: what lies unpacked, and what set-ups made of it.

The store is imported late: it takes its images from here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING

from app.environments.image_store import unpacked
from app.environments.image_store.book import Book, Entry
from app.environments.image_store.eviction import Held, Layer
from app.environments.image_store.stock import Here
from app.environments.image_store.watermark import Disk, disk_at
from app.errors import ImageUnavailable
from app.settings import Settings

if TYPE_CHECKING:
    from app.environments.oci.store import ImageStore, Listed

_SET_UP = "setup:"
"""So begins the id of what a set-up made."""


class Unpacked:
    """Implements `Stock`. All of it we have brought here, but what came from an engine that is no more."""

    def __init__(self, settings: Settings, book: Book) -> None:
        self._settings = settings
        self._home = settings.home.resolve()
        self._book = book

    @property
    def _store(self) -> ImageStore:
        from app.environments.oci.store import ImageStore

        return ImageStore(self._home)

    def images(self) -> list[Here]:
        store, entries = self._store, self._book.entries()
        names = defaultdict(list)
        for reference, image_id in store.references().items():
            names[image_id].append(reference)
        users, in_use = unpacked.users(self._home), self._layers_in_use()
        return [
            self._set_up(store, one, entries.get(one.image.id), in_use)
            if one.snapshot is not None
            else self._image(store, one, entries.get(one.image.id), names[one.image.id], users[one.image.id])
            for one in store.listed()
        ]

    def disk(self) -> Disk | None:
        return disk_at(self._store.layers)

    def remove(self, image: Here) -> bool:
        store = self._store
        if not image.held.derived:
            unpacked.forget(self._home, image.id)
            return store.image(image.id) is None
        name = image.id.removeprefix(_SET_UP)
        if any(one.snapshot == name and one.used_at > image.held.used_at for one in store.listed()):
            return False  # used since it was looked at
        store.remove_setup(name, keep=self._layers_in_use())
        return all(one.snapshot != name for one in store.listed())

    def tidy(self) -> None:
        unpacked.tidy(self._home)

    def _layers_in_use(self) -> set[str]:
        from app.environments.oci.records import Records

        try:
            return Records(self._home).layers_in_use()
        except OSError as error:
            raise ImageUnavailable(f"which images are in use cannot be told: {error}; none goes. Try again.") from error

    def _image(self, store: ImageStore, one: Listed, entry: Entry | None, names: Collection[str], users: int) -> Here:
        ours = entry is None or entry.ours  # what an engine had before us is always in the book
        known = entry or Entry(one.image.id)
        return Here(
            held=_held(store, one, one.image.id, known),
            names=tuple(sorted({*names, *known.names})),
            size_bytes=store.size_bytes(one.image.layers),
            ours=ours,
            containers=users,
            pinned=not {self._settings.base_image, self._settings.worker_image}.isdisjoint(names),
        )

    def _set_up(self, store: ImageStore, one: Listed, entry: Entry | None, in_use: Collection[str]) -> Here:
        name = f"{_SET_UP}{one.snapshot}"
        return Here(
            held=_held(store, one, name, entry or Entry(one.image.id)),
            names=(name[:24],),
            size_bytes=store.size_bytes(one.image.layers),
            ours=True,
            containers=int(one.image.layers[-1] in in_use),
        )


def _held(store: ImageStore, one: Listed, identity: str, entry: Entry) -> Held:
    """What a set-up made is wanted by whoever wants its image."""
    layers = tuple(Layer(name, store.size_bytes([name])) for name in one.image.layers)
    derived = one.snapshot is not None
    used_at = one.used_at if derived else max(one.used_at, entry.used_at)
    return Held(identity, frozenset(entry.keys), layers, used_at, derived)
