"""Where the images of a host lie: on its engine, or, where there is none, unpacked in a store of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.errors import EngineUnavailable
from app.host.engine import engine_of, url_of
from app.images import layer_use
from app.images.disk_thresholds import Disk
from app.images.eviction import HeldImage
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
    """Whether this host makes its environments without an engine, as it has none.

    An engine that answered this process before and is away for now still counts as one.
    """
    try:
        engine_of(settings)
    except EngineUnavailable:
        return url_of(settings).startswith("unix://") and (layer_use.any_here(settings.home) or _may_unpack(settings))
    return False


def _may_unpack(settings: Settings) -> bool:
    from app.environments.runtimes.oci import available

    return available(settings) is None
