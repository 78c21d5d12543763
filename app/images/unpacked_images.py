"""Finds or makes the unpacked image of a task: from the engine where there is one, else from the registry."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from app.errors import DiskFull, EngineUnavailable, ImageUnavailable, StationError
from app.host.engine import engine_of
from app.host.slots import Semaphore, turn
from app.images import engine_layers
from app.images.cache import ImageCache
from app.images.layer_index import tidy
from app.images.layer_store import ImageStore, StoredImage
from app.images.logins import login_for
from app.images.pull_source import PullSource, tell
from app.images.references import Reference, built_for_all, in_mirror, key_of, registry_of
from app.images.registry_pull import pull
from app.images.registry_refusals import pull_first
from app.images.task_images import Images
from app.models.spec import Bundle, EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

_BELIEVED_S = 30.0
"""Time for which a resolved reference is reused: a tag may move."""


class OciImages:
    """The images of one home, each made and fetched once for all callers."""

    def __init__(
        self, settings: Settings, store: ImageStore, *, fetch_bundle: Callable[[Bundle], bytes], semaphore: Semaphore
    ) -> None:
        self._settings = settings
        self._store = store
        self._semaphore = semaphore
        self._engines = Images(settings, fetch_bundle=fetch_bundle, semaphore=semaphore)
        self._cache = ImageCache(settings)
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, float]] = {}  # image id, and until when it is reused: monotonic seconds

    def ensure(self, spec: EnvironmentSpec, *, timeout_s: float) -> StoredImage:
        """Puts the spec's image into the store and returns it.

        Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        name = _name_of(spec)
        if (known := self._believed(name)) is not None:
            return known
        image = self._with_room(spec, time.monotonic() + timeout_s)
        with self._lock:
            self._known[name] = (image.id, time.monotonic() + _BELIEVED_S)
        return image

    def here(self, spec: EnvironmentSpec) -> bool:
        """Whether `ensure` would neither fetch nor build. Raises: ImageUnavailable: no answer of the engine."""
        reference = spec.image
        if self._believed(_name_of(spec)) is not None:
            return True
        if reference is not None and reference.startswith("sha256:") and self._store.image(reference):
            return True
        try:
            return self._engines.here(spec) is not None
        except EngineUnavailable as error:
            try:
                return self._recalled(reference or self._built_elsewhere(spec, error)) is not None
            except EngineUnavailable:
                return False

    def _believed(self, name: str) -> StoredImage | None:
        with self._lock:
            image_id, until = self._known.get(name, ("", 0.0))
        return self._store.image(image_id) if time.monotonic() < until else None

    def _with_room(self, spec: EnvironmentSpec, deadline: float) -> StoredImage:
        """Makes room once if the disk is full. If the image does not fit even then, no remains are left."""
        try:
            return self._resolved(spec, deadline)
        except DiskFull as error:
            if not self._made_room():
                raise _too_full(spec, error, "no image here may go") from error
        try:
            return self._resolved(spec, deadline)
        except DiskFull as error:
            tidy(self._settings.home)
            raise _too_full(spec, error, "too little room was left by the images that may go") from error

    def _made_room(self) -> bool:
        with suppress(StationError):  # it is unknown what is in use
            return bool(self._cache.make_room(urgently=True))
        return False

    def _resolved(self, spec: EnvironmentSpec, deadline: float) -> StoredImage:
        reference, book = spec.image, self._cache.book
        if reference is not None and reference.startswith("sha256:") and (here := self._store.image(reference)):
            if book.entry(here.id).keys:
                book.used(here.id, key_of(spec))
            return here
        try:
            with self._engines.pinned(spec, timeout_s=deadline - time.monotonic()) as image_id:
                image = self._store.image(image_id) or self._unpacked(image_id, deadline)
        except EngineUnavailable as error:
            log.debug("image.without_engine", image=spec.label, reason=str(error))
            return self._without_engine(spec, reference or self._built_elsewhere(spec, error), deadline)
        if reference is not None:
            self._store.remember(reference, image_id)
        return image

    def _without_engine(self, spec: EnvironmentSpec, reference: str, deadline: float) -> StoredImage:
        """Pulls and records the image, so that it is evicted in its turn, but not meanwhile."""
        book, key = self._cache.book, key_of(spec)
        try:
            with book.pinned(key, timeout_s=deadline - time.monotonic()):
                image = self._pulled(reference, deadline)
                if book.entry(image.id).keys:
                    book.used(image.id, key)
                else:
                    book.made(image.id, key, [reference])
        except TimeoutError as error:
            raise ImageUnavailable(f"could not use image {spec.label} in time: {error}; try again.") from error
        return image

    def _built_elsewhere(self, spec: EnvironmentSpec, error: EngineUnavailable) -> str:
        """Returns the mirror's name for a recipe's image, which cannot be built here."""
        mirror = self._settings.image_mirror
        if mirror is None or spec.build is None:
            raise EngineUnavailable(
                f"an image made by a recipe needs a container engine to build it, or a registry in "
                f"MEGAFLOW_IMAGE_MIRROR that has it: {error}"
            ) from error
        return built_for_all(mirror, spec.build, self._settings.base_image)

    def _unpacked(self, image_id: str, deadline: float) -> StoredImage:
        left_s = max(0.0, deadline - time.monotonic())
        return engine_layers.take(engine_of(self._settings), image_id, self._store, timeout_s=left_s)

    def _pulled(self, reference: str, deadline: float) -> StoredImage:
        """Pulls the image. An image that was here before is not requested again; an engine does the same."""
        if (here := self._recalled(reference)) is not None:
            return here
        name = f"oci-pull-{hashlib.sha256(reference.encode()).hexdigest()[:24]}"
        try:
            with turn(self._settings.home / "run" / "slots" / name, timeout_s=deadline - time.monotonic()):
                tell(PullSource.PULL)
                return self._recalled(reference) or self._pull_in_turn(reference, deadline)
        except TimeoutError as error:
            raise ImageUnavailable(f"could not pull {reference} in time: {error}; try again.") from error

    def _recalled(self, reference: str) -> StoredImage | None:
        image_id = self._store.recall(reference)
        return self._store.image(image_id) if image_id else None

    def _pull_in_turn(self, reference: str, deadline: float) -> StoredImage:
        """Limits pulls on this host, as images are unpacked, too. Raises: TimeoutError: no place was free."""
        limit, capacity = f"image_builds:{self._settings.host()}", self._settings.image_builds
        with self._semaphore.hold(limit, capacity, timeout_s=deadline - time.monotonic()):
            return self._pull_first(reference, deadline)

    def _pull_first(self, reference: str, deadline: float) -> StoredImage:
        with suppress(StationError):  # the engine became unavailable, or it is unknown what is in use
            self._cache.make_room()
        mirror = self._settings.image_mirror
        candidates = [*(in_mirror(mirror, reference) if mirror else []), reference]
        image = pull_first(reference, candidates, lambda one: self._pull(one, deadline))
        self._store.remember(reference, image.id)
        return image

    def _pull(self, candidate: str, deadline: float) -> StoredImage:
        limit, capacity = f"image_pulls:{registry_of(candidate)}", self._settings.image_pulls
        begun, login = time.monotonic(), login_for(self._settings, registry_of(candidate))
        with self._semaphore.hold(limit, capacity, timeout_s=deadline - begun):
            image = pull(Reference.parse(candidate), self._store, deadline, login)
        log.info("image.pulled", image=candidate, took_s=round(time.monotonic() - begun, 3))
        return image


def _too_full(spec: EnvironmentSpec, error: DiskFull, why: str) -> DiskFull:
    return DiskFull(f"expected room for image {spec.label}, found a full disk ({error}), and {why}")


def _name_of(spec: EnvironmentSpec) -> str:
    return spec.image or (spec.build.model_dump_json() if spec.build else "")
