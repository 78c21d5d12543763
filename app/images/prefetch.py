"""Pulls the images that the queue needs next, one process per host, and keeps the disk within its thresholds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress

import structlog

from app.errors import DatabaseUnavailable, DiskFull, EngineUnavailable, MegaFlowError, StationError
from app.host.slots import HostSemaphore, Semaphore, turn
from app.images.cache import ImageCache
from app.images.image_index import without_engine
from app.images.layer_store import ImageStore
from app.images.references import key_of
from app.images.task_images import Images
from app.images.unpacked_images import OciImages
from app.models.spec import Bundle, EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

_LOOK_S = 3.0
_AWAY_S = 10.0
"""Wait while the engine or the ledger does not answer, or while another process of this host does the work."""
_FAILED_S = 120.0
"""Time for which an image that could not be pulled or built is not prefetched again."""
_MAKE_S = 1800.0

Queue = Callable[[bool], Sequence[EnvironmentSpec]]
"""Returns the environments that the queue will need, soonest first. True: as far as known; False: only its head.

Raises: DatabaseUnavailable.
"""
Others = Callable[[Sequence[str]], Collection[str]]
"""Returns those of these images that tasks will find on another host.

Raises: DatabaseUnavailable.
"""


class IdleSemaphore:
    """Takes a place only if one is free now: tasks that wait for an image have priority over prefetches."""

    def __init__(self, semaphore: Semaphore) -> None:
        self._semaphore = semaphore

    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> AbstractContextManager[None]:
        return self._semaphore.hold(limit, capacity, timeout_s=min(timeout_s, 0.0))


class Prefetcher:
    """Manages the images of one host; `run` blocks until it is stopped.

    fetch_bundle, semaphore: as for `Images`; only free places of the semaphore are used. Images that `others` have or
    will have are neither prefetched here nor kept for the queue.
    """

    others: Others = staticmethod(lambda _: ())

    def __init__(
        self,
        settings: Settings,
        *,
        queue: Queue,
        fetch_bundle: Callable[[Bundle], bytes],
        semaphore: Semaphore | None = None,
    ) -> None:
        self._ahead = settings.image_prefetch
        self._alone = settings.home / "run" / "slots" / "prefetch"
        self._queue = queue
        semaphore = semaphore or HostSemaphore(settings.home / "run" / "slots")
        self._images = HostImages(settings, fetch_bundle=fetch_bundle, semaphore=IdleSemaphore(semaphore))
        self._cache = ImageCache(settings)
        self._left_until: dict[str, float] = {}  # by key, until when it is skipped: monotonic seconds

    def run(self, stop: threading.Event) -> None:
        """Works while no other process of this host does."""
        while not stop.is_set():
            try:
                with turn(self._alone, timeout_s=0.0):
                    self._work(stop)
            except TimeoutError:
                stop.wait(_AWAY_S)

    def _work(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                busy = self.look()
            except (EngineUnavailable, DatabaseUnavailable) as error:
                log.debug("prefetch.away", reason=str(error))
                stop.wait(_AWAY_S)
            except StationError as error:
                log.warning("prefetch.failed", reason=str(error))
                stop.wait(_AWAY_S)
            else:
                stop.wait(0.0 if busy else _LOOK_S)

    def look(self) -> bool:
        """Records the queue, makes room, fetches at most one image. Returns whether to look again at once."""
        room = self._cache.room_bytes()
        # With room on the disk the head of the queue is enough.
        usable = self._images.of_use(self._queue(room is None or room <= 0))
        elsewhere = self.others([key_of(spec) for spec in usable])
        specs = list({key_of(spec): spec for spec in usable if key_of(spec) not in elsewhere}.values())
        with suppress(DiskFull):  # then the last recorded queue counts
            self._cache.book.note_queue([key_of(spec) for spec in specs])
        self._cache.make_room()
        now = time.monotonic()
        missing = [
            spec
            for spec in specs[: self._ahead]
            if self._left_until.get(key_of(spec), 0.0) <= now and not self._images.here(spec)
        ]
        return bool(missing) and (room is None or room > 0) and self._fetch(missing[0])

    def _fetch(self, spec: EnvironmentSpec) -> bool:
        try:
            self._images.ensure(spec, timeout_s=_MAKE_S)
        except EngineUnavailable:
            raise
        except MegaFlowError as error:
            if isinstance(error.__cause__, TimeoutError):  # no place is free
                return False
            log.info("prefetch.left", image=spec.label, reason=str(error))
            self._left_until[key_of(spec)] = time.monotonic() + _FAILED_S
            return True
        log.info("prefetch.fetched", image=spec.label)
        return True


class HostImages:
    """Images of environments, wherever this host stores them. fetch_bundle, semaphore: as for `Images`."""

    def __init__(
        self, settings: Settings, *, fetch_bundle: Callable[[Bundle], bytes], semaphore: Semaphore | None = None
    ) -> None:
        self._settings = settings
        semaphore = semaphore or HostSemaphore(settings.home / "run" / "slots")
        self._on_engine = Images(settings, fetch_bundle=fetch_bundle, semaphore=semaphore)
        store = ImageStore(settings.home.resolve())
        self._unpacked = OciImages(settings, store, fetch_bundle=fetch_bundle, semaphore=semaphore)

    def of_use(self, specs: Iterable[EnvironmentSpec]) -> list[EnvironmentSpec]:
        """Returns the environments of one image that can be had here: a recipe needs an engine, or a mirror."""
        recipes = self._settings.image_mirror is not None or not without_engine(self._settings)
        return [spec for spec in specs if spec.compose is None and (spec.build is None or recipes)]

    def here(self, spec: EnvironmentSpec) -> bool:
        """Whether the image is here; fetches nothing. Raises: EngineUnavailable, ImageUnavailable: no answer."""
        if without_engine(self._settings):
            return self._unpacked.here(spec)
        return self._on_engine.here(spec) is not None

    def ensure(self, spec: EnvironmentSpec, *, timeout_s: float) -> None:
        """Pulls or builds a missing image. Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull."""
        if without_engine(self._settings):
            self._unpacked.ensure(spec, timeout_s=timeout_s)
        else:
            self._on_engine.ensure(spec, timeout_s=timeout_s)
