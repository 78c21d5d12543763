"""Finds images of a host: on its engine, or in its own store where there is no engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from app.errors import EngineUnavailable
from app.host.engine import Engine, engine_of, url_of
from app.images.eviction import HeldImage
from app.images.layer_store import ImageStore
from app.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Here(HeldImage):
    """An image on this host. `ours`: MegaFlow pulled or built it under these `names`, so it may be evicted."""

    names: tuple[str, ...]
    size_bytes: int
    ours: bool
    containers: int  # existing containers of it, running or not
    pinned: bool = False  # the base of recipes, the worker's own image


class ImageIndex(Protocol):
    """The images of one place, and the disk that they are on. Safe to share between threads.

    Raises (every method): EngineUnavailable, EnvironmentFailed, ImageUnavailable.
    """

    @property
    def is_all(self) -> bool:
        """Whether an image removed here is gone: an engine that is temporarily away may still have it."""
        ...

    def images(self) -> list[Here]:
        """Returns all images here, with their metadata."""
        ...

    def disk(self) -> Disk | None:
        """Returns the disk; None: it is not visible here."""
        ...

    def remove(self, image: Here) -> bool:
        """Removes an image, never by force. False: it is in use and stays."""
        ...

    def tidy(self) -> None:
        """Removes what belongs to no image."""
        ...


def without_engine(settings: Settings) -> bool:
    """Whether this host creates environments without an engine, also while a local engine is unavailable."""
    try:
        engine_of(settings)
    except EngineUnavailable:
        return url_of(settings).startswith("unix://") and (
            bool(ImageStore(settings.home.resolve()).images()) or _may_unpack(settings)
        )
    return False


def _may_unpack(settings: Settings) -> bool:
    from app.environments.runtimes.oci import available

    return available(settings) is None


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of the images, in bytes as an unprivileged writer sees it."""

    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Above `high`, images are evicted until `low`. Up to 1: a share of the disk; above 1: bytes of all images."""

    high: float
    low: float

    @classmethod
    def of(cls, settings: Settings) -> Watermarks:
        """Reads the marks. A low mark above the high one, or in the other unit, becomes the high one."""
        high, low = settings.image_disk_high, settings.image_disk_low
        return cls(high, low if low <= high and (low <= 1) == (high <= 1) else high)

    @property
    def in_bytes(self) -> bool:
        return self.high > 1


def above(mark: float, disk: Disk | None, image_bytes: int) -> int:
    """Returns the bytes to free until the mark; negative: room. 0 for a share of a disk that is not visible (None)."""
    if mark > 1:
        return image_bytes - int(mark)
    return 0 if disk is None else disk.used_bytes - int(mark * disk.total_bytes)


def disk_of(engine: Engine) -> Disk | None:
    """Returns the engine's disk; None: not visible to this process. Raises: EngineUnavailable, EnvironmentFailed."""
    if not engine.is_local:
        return None
    about = engine.about
    root = Path(about["DockerRootDir"])
    # A process in a container may reach the engine and have a folder of that name, but never with this content.
    if not os.path.isdir(root / "image" / about["Driver"]):  # also False without permission
        log.debug("images.disk_not_visible", folder=str(root))
        return None
    return disk_at(root)


def disk_at(folder: Path) -> Disk:
    """Returns the disk of a folder, or of the nearest existing folder above."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    stats = os.statvfs(folder)
    used = (stats.f_blocks - stats.f_bfree) * stats.f_frsize
    return Disk(total_bytes=used + stats.f_bavail * stats.f_frsize, used_bytes=used)
