"""Lists the images of a container engine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from docker.errors import APIError

from app.errors import ImageUnavailable
from app.host.engine import Engine, engine_of, missing
from app.images.eviction import ImageLayer
from app.images.image_index import Disk, Here, disk_of
from app.images.layer_index import Unpacked, forget, tidy, users_of
from app.images.metadata import ImageEntry, ImageMetadata
from app.images.references import short
from app.settings import Settings

log = structlog.get_logger()

_BASE = "megaflow.setup.base"
"""Label of a set-up's image: the image that it is based on."""
_NO_LAYER = (
    *("ENV", "CMD", "LABEL", "ENTRYPOINT", "EXPOSE", "USER", "VOLUME"),
    *("ARG", "SHELL", "HEALTHCHECK", "MAINTAINER", "STOPSIGNAL", "ONBUILD"),
)
"""Steps of a recipe that change no file."""


class OnEngine:
    """Implements `ImageIndex` for an engine. An image is removed with its unpacked layers, after its set-ups."""

    is_all = True

    def __init__(self, settings: Settings, book: ImageMetadata) -> None:
        self._settings = settings
        self._book = book
        self._unpacked = Unpacked(settings, book)
        self._layers: dict[str, tuple[ImageLayer, ...]] = {}
        self._lock = threading.Lock()

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    def images(self) -> list[Here]:
        engine, entries = self._engine, self._book.entries()
        with engine.named("list images", ImageUnavailable):
            users = Counter(str(found["ImageID"]) for found in engine.api.containers(all=True))
            users += users_of(self._settings.home)
            listed: list[dict[str, Any]] = engine.api.images()
            for one in listed:  # users of a set-up's image also use the image that it was made from
                if base := (one.get("Labels") or {}).get(_BASE):
                    users[base] += users[one["Id"]]
            found = [self._here(engine, one, entries, users) for one in listed]
        return [*(image for image in found if image), *self._set_ups()]

    def _set_ups(self) -> list[Here]:
        """Returns the unpacked set-ups; none if they are on another disk, where they use no room of these images."""
        disk, theirs = self.disk(), self._unpacked.disk()
        return [] if disk and theirs and disk.total_bytes != theirs.total_bytes else self._unpacked.set_ups()

    def disk(self) -> Disk | None:
        return disk_of(self._engine)

    def remove(self, image: Here) -> bool:
        if self._unpacked.is_set_up(image):
            return self._unpacked.remove(image)
        engine = self._engine
        if self._in_use(engine, image.id):
            return False
        for name in image.names or (image.id,):
            try:
                with engine.named(f"remove image {name}", ImageUnavailable):
                    engine.api.remove_image(name)
            except ImageUnavailable as error:
                if missing(error):
                    continue
                log.info("images.not_evicted", image=name, reason=str(error))
                return False
        forget(self._settings.home, image.id)  # its files are shared with the engine: only now are they free
        return True

    def tidy(self) -> None:
        tidy(self._settings.home)

    def _here(
        self, engine: Engine, found: dict[str, Any], entries: Mapping[str, ImageEntry], users: Mapping[str, int]
    ) -> Here | None:
        try:
            layers = self._layers_of(engine, found["Id"])
        except APIError as error:
            if error.status_code == 404:  # removed meanwhile
                return None
            raise
        entry = entries.get(found["Id"]) or ImageEntry(found["Id"])
        names = _names(found)
        # A name that MegaFlow did not give is a person's: then the image belongs to that person, too.
        ours = entry.ours and all(name in entry.names for name in found.get("RepoTags") or [] if not _unnamed(name))
        return Here(
            id=found["Id"],
            keys=frozenset(entry.keys),
            layers=layers,
            used_at=entry.used_at,
            derived=_BASE in (found.get("Labels") or {}),
            names=names,
            size_bytes=int(found["Size"]),
            ours=ours,
            containers=users.get(found["Id"], 0),
            pinned=not {self._settings.base_image, self._settings.worker_image}.isdisjoint(names),
        )

    def _layers_of(self, engine: Engine, image_id: str) -> tuple[ImageLayer, ...]:
        if image_id not in self._layers:
            chain: list[str] = engine.api.inspect_image(image_id)["RootFS"].get("Layers") or []  # type: ignore[no-untyped-call]
            layers = layers_of(chain, engine.api.history(image_id))  # type: ignore[no-untyped-call]
            with self._lock:
                self._layers[image_id] = layers
        return self._layers[image_id]

    def _in_use(self, engine: Engine, image_id: str) -> bool:
        if users_of(self._settings.home)[image_id]:
            return True
        # Not by the filter `ancestor`: it counts containers of images that build on this one.
        with engine.named("list containers", ImageUnavailable):
            return any(container["ImageID"] == image_id for container in engine.api.containers(all=True))


def layers_of(chain: Sequence[str], history: Sequence[Mapping[str, Any]]) -> tuple[ImageLayer, ...]:
    """Returns the layers from the bottom. A layer's id covers all layers below: only then is it the same on disk.

    The engine lists sizes by step of the recipe, and not every step makes a layer.
    """
    steps = list(reversed(history))
    sizes = [int(step["Size"]) for step in steps if step["Size"] or not _is_setting(str(step.get("CreatedBy", "")))]
    if len(sizes) != len(chain):
        sizes = [int(step["Size"]) for step in steps if step["Size"]]
    sizes += [0] * (len(chain) - len(sizes))
    last = len(chain) - 1
    sizes = [*sizes[:last], sum(sizes[last:])] if chain else []
    layers, below = [], ""
    for diff, size in zip(chain, sizes, strict=True):
        below = short(below, diff)
        layers.append(ImageLayer(below, size))
    return tuple(layers)


def _is_setting(created_by: str) -> bool:
    """Whether a step of a recipe changes no file, by the engine's record of it."""
    step = created_by.removeprefix("/bin/sh -c ").replace("#(nop)", "").split()
    return bool(step) and step[0] in _NO_LAYER


def _names(found: Mapping[str, Any]) -> tuple[str, ...]:
    given = [*(found.get("RepoTags") or []), *(found.get("RepoDigests") or [])]
    return tuple(name for name in given if not _unnamed(name))


def _unnamed(name: str) -> bool:
    return "<none>" in name
