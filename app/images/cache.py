"""Manages the image cache of one host: its images, the demand for them, and eviction when the disk fills."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import structlog

from app.host.slots import turn
from app.images.engine_index import OnEngine
from app.images.eviction import choose_victims, total_bytes
from app.images.image_index import Disk, Here, ImageIndex, Watermarks, above, without_engine
from app.images.layer_index import Unpacked
from app.images.metadata import ImageMetadata
from app.settings import Settings

log = structlog.get_logger()

FRESH_S = 60.0
"""Time after its last use for which an image stays: a container may be about to start."""
_ROUNDS = 3
"""Number of eviction rounds. The freed bytes are an estimate, so they are measured and images are chosen again."""


@dataclass(frozen=True, slots=True)
class View:
    """Snapshot of a host's images."""

    images: list[Here]
    disk: Disk | None
    marks: Watermarks
    queue: list[str]  # keys, soonest needed first

    @property
    def image_bytes(self) -> int:
        return total_bytes(self.images)

    def above(self, mark: float) -> int:
        """Returns the bytes to free until `mark`; negative: room."""
        return above(mark, self.disk, self.image_bytes)

    def staying(self, now: float, fresh_s: float = FRESH_S) -> set[str]:
        """Returns the ids of images that may not be evicted automatically."""
        return {
            image.id
            for image in self.images
            if not image.ours or image.pinned or image.containers or now - image.used_at < fresh_s
        }

    def victims(self, need_bytes: int, now: float, fresh_s: float = FRESH_S) -> list[str]:
        """Returns the images to evict to free these bytes, in the order of eviction."""
        return choose_victims(self.images, self.queue, self.staying(now, fresh_s), need_bytes)


class ImageCache:
    """Reads the images and the metadata of this host, and evicts images. Safe to share between threads.

    The images are those of the engine; on a host without an engine, the unpacked ones.

    fresh_s: see `FRESH_S`.
    """

    def __init__(self, settings: Settings, *, fresh_s: float = FRESH_S) -> None:
        self.book = ImageMetadata(settings)
        self._settings = settings
        self._fresh_s = fresh_s
        self._marks = Watermarks.of(settings)
        self._evicting = settings.home / "run" / "slots" / "evict"
        self._on_engine = OnEngine(settings, self.book)
        self._unpacked = Unpacked(settings, self.book)

    @property
    def _index(self) -> ImageIndex:
        return self._unpacked if without_engine(self._settings) else self._on_engine

    def look(self) -> View:
        """Returns all images, with their metadata. Raises: EngineUnavailable, EnvironmentFailed, ImageUnavailable."""
        stock = self._index
        return View(stock.images(), stock.disk(), self._marks, self.book.queue())

    def room_bytes(self) -> int | None:
        """Returns the bytes until the low mark, negative above it; None: a share of a disk that is not visible.

        Raises: EngineUnavailable, EnvironmentFailed, ImageUnavailable.
        """
        if self._marks.in_bytes:
            view = self.look()
            return -view.above(view.marks.low)
        disk = self._index.disk()
        return None if disk is None else -above(self._marks.low, disk, 0)

    def make_room(self, *, urgently: bool = False) -> list[str]:
        """Evicts until the low mark if the disk is above its high mark, or `urgently`. Returns the evicted names.

        One process of a host evicts at a time. Another one returns an empty list, `urgently` only after 30 s.

        Raises: EngineUnavailable, EnvironmentFailed, ImageUnavailable.
        """
        if not urgently and not self._marks.in_bytes and above(self._marks.high, self._index.disk(), 0) <= 0:
            return []
        try:
            with turn(self._evicting, timeout_s=30.0 if urgently else 0.0):
                return self._make_room(urgently)
        except TimeoutError:
            return []

    def _make_room(self, urgently: bool) -> list[str]:
        evicted: list[str] = []
        self._index.tidy()
        for attempt in range(_ROUNDS):
            view = self.look()
            if not attempt and not urgently and view.above(view.marks.high) <= 0:
                break
            need = view.above(view.marks.low)
            if urgently and not attempt:
                need = max(need, 1)  # the disk is full, whatever the marks are
            removed = self.evict(view, view.victims(need, time.time(), self._fresh_s))
            evicted += removed
            if not removed:
                break
        if evicted:
            log.info("images.evicted", images=evicted)
        return evicted

    def evict(self, view: View, image_ids: Collection[str]) -> list[str]:
        """Removes these images, never by force. Returns the names of removed ones. An image in use again stays."""
        by_id = {image.id: image for image in view.images}
        return [by_id[i].names[0] if by_id[i].names else i for i in image_ids if self._remove(by_id[i])]

    def _remove(self, image: Here) -> bool:
        with self.book.alone(sorted(image.keys)) as free:
            used_again = self.book.entry(image.id).used_at > image.used_at
            if not free or used_again or not self._index.remove(image):
                return False
            if self._index.is_all:
                self.book.forget(image.id)
            return True
