"""How full the images' disk is, and how much has to go."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.host.engine import Engine
from app.settings import Settings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk that images are kept on, in bytes as an unprivileged writer sees it."""

    total_bytes: int
    used_bytes: int

    @property
    def share(self) -> float:
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


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
    """Bytes to free until the mark is reached; negative: room that is left. `disk` None: it cannot be seen.

    A share of a disk that cannot be read asks for nothing.
    """
    if mark > 1:
        return image_bytes - int(mark)
    return 0 if disk is None else disk.used_bytes - int(mark * disk.total_bytes)


def disk_of(engine: Engine) -> Disk | None:
    """None: the engine is on another host, or keeps its images where this process cannot look.

    Raises: EngineUnavailable, EnvironmentFailed.
    """
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
