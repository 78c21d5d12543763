"""Which images a host has, by what tasks call them: cheap to ask every few seconds while nothing changes."""

from __future__ import annotations

import time
from typing import Any

import structlog

from app.errors import ImageUnavailable, StationError
from app.host.engine import engine_of
from app.images import layer_use
from app.images.metadata import ImageMetadata
from app.settings import Settings

log = structlog.get_logger()

_BELIEVED_S = 60.0
"""How long the engine's list is believed without a change by MegaFlow: other programs pull and remove, too."""


class ImageChanges:
    """Looks at the book, the engine and the unpacked images of one home. For one thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._book = ImageMetadata(settings)
        self._marks: frozenset[str] | None = None
        self._keys: frozenset[str] = frozenset()
        self._looked_at = 0.0  # monotonic seconds

    def here(self) -> frozenset[str]:
        """What tasks call the images that are here."""
        marks = self._book.change_marker() | layer_use.change_marker(self._settings.home)
        if marks != self._marks or time.monotonic() - self._looked_at > _BELIEVED_S:
            self._keys = self._look()
            self._marks, self._looked_at = marks, time.monotonic()
        return self._keys

    def _look(self) -> frozenset[str]:
        """An engine that answers is asked for every image; without one, what lies unpacked is all there is.

        A project is here when all its images are; without an engine it cannot be used.
        """
        listed, known = self._listed(), self._book.entries().items()
        if listed is None:
            here = layer_use.references(self._settings.home)
            ids = set(here.values())
            return frozenset(here).union(*(entry.keys for image_id, entry in known if image_id in ids))
        keys = {key for image_id, entry in known if image_id in listed for key in entry.keys}.union(*listed.values())
        return frozenset(keys | {project for project, parts in self._book.projects().items() if parts <= keys})

    def _listed(self) -> dict[str, set[str]] | None:
        """The engine's images, each with its names; None: no engine answers."""
        try:
            engine = engine_of(self._settings)
            with engine.named("list images", ImageUnavailable):
                found = engine.api.images()
        except StationError as error:
            log.debug("images.no_engine", reason=str(error))
            return None
        return {image["Id"]: _names(image) for image in found}


def _names(image: dict[str, Any]) -> set[str]:
    given = (*(image.get("RepoTags") or ()), *(image.get("RepoDigests") or ()))
    return {name for name in given if "<none>" not in name}
