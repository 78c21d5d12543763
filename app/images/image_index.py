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


@dataclass(frozen=True, slots=True)
class Here:
    """An image on this host. `ours`: pulled or built by us under these `names`, so that it may go by itself."""

    held: HeldImage
    names: tuple[str, ...]
    size_bytes: int
    ours: bool
    containers: int  # that exist with it, running or not
    pinned: bool = False  # the base of recipes, the worker's own image

    @property
    def id(self) -> str:
        return self.held.id


class ImageIndex(Protocol):
    """The images of one place, and the disk that they are on. Safe to share between threads.

    Raises (every method): EngineUnavailable, EnvironmentFailed, ImageUnavailable.
    """

    @property
    def is_all(self) -> bool:
        """Whether an image that goes from here has gone: an engine that is away for now may have it, too."""
        ...

    def images(self) -> list[Here]:
        """Everything that is here, and what we know of it."""
        ...

    def disk(self) -> Disk | None:
        """None: it cannot be seen from here."""
        ...

    def remove(self, image: Here) -> bool:
        """Never by force. False: it is in use, and stays."""
        ...

    def tidy(self) -> None:
        """Remove what belongs to no image."""
        ...


def without_engine(settings: Settings) -> bool:
    """Whether this host makes environments without an engine; one that is away for now still counts."""
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
    """The disk that images are kept on, in bytes as an unprivileged writer sees it."""

    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Above `high`, images go until `low`. Up to 1: a share of the disk; above: bytes that all images may take."""

    high: float
    low: float

    @classmethod
    def of(cls, settings: Settings) -> Watermarks:
        """A low mark above the high one, or in the other unit, is the high one."""
        high, low = settings.image_disk_high, settings.image_disk_low
        return cls(high, low if low <= high and (low <= 1) == (high <= 1) else high)

    @property
    def in_bytes(self) -> bool:
        return self.high > 1


def above(mark: float, disk: Disk | None, image_bytes: int) -> int:
    """Bytes to free until the mark; negative: room. A share of a disk that cannot be seen (None) asks for nothing."""
    if mark > 1:
        return image_bytes - int(mark)
    return 0 if disk is None else disk.used_bytes - int(mark * disk.total_bytes)


def disk_of(engine: Engine) -> Disk | None:
    """None: it is elsewhere, or not visible to this process. Raises: EngineUnavailable, EnvironmentFailed."""
    if not engine.is_local:
        return None
    about = engine.about
    root = Path(about["DockerRootDir"])
    # A process in a container may talk to the engine and have a folder of that name, but never with that inside.
    if not os.path.isdir(root / "image" / about["Driver"]):  # False, too, where we may not look
        log.debug("images.disk_not_visible", folder=str(root))
        return None
    return disk_at(root)


def disk_at(folder: Path) -> Disk:
    """The disk of a folder, or, while there is none, of the nearest one above."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return Disk(total_bytes=used + found.f_bavail * found.f_frsize, used_bytes=used)
