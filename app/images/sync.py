"""Copies or builds all images of a dataset into a registry; existing ones are skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum

import structlog
from docker.utils import parse_repository_tag

from app.errors import ImageUnavailable, MegaFlowError
from app.host.engine import Engine, engine_of
from app.host.slots import Semaphore
from app.images.engine_registry import Registries
from app.images.metadata import ImageMetadata
from app.images.references import built_for_all, digest_tag, in_mirror, key_of
from app.images.registry_refusals import kind_of
from app.images.task_images import Images
from app.models.spec import IMAGELESS, Bundle, EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

_EACH_S = 3600.0
"""Time limit for one image, with its build."""


class SyncOutcome(StrEnum):
    PRESENT = "present"  # the registry already had it
    BUILT = "built"
    COPIED = "copied"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Item:
    """An image that tasks of a dataset need. `target`: its name in the registry; None: it can have none."""

    key: str
    spec: EnvironmentSpec
    target: str | None
    tasks: int


@dataclass(frozen=True, slots=True)
class SyncResult:
    """Result for one image. `error`: class of the failure; `message`: its text."""

    item: Item
    outcome: SyncOutcome
    took_s: float
    digest: str | None = None
    error: str | None = None
    message: str | None = None


def items_of(specs: Iterable[EnvironmentSpec], to: str, base_image: str) -> list[Item]:
    """Returns each image once, in the order of the tasks; environments without one are left out."""
    items: dict[str, Item] = {}
    for spec in specs:
        if spec.kind in IMAGELESS:
            continue
        key = key_of(spec)
        known = items.get(key) or Item(key, spec, _target(spec, to, base_image), 0)
        items[key] = Item(key, known.spec, known.target, known.tasks + 1)
    return list(items.values())


def _target(spec: EnvironmentSpec, to: str, base_image: str) -> str | None:
    if spec.build is not None:
        return built_for_all(to, spec.build, base_image)
    names = in_mirror(to, spec.image or "")
    return digest_tag(names[0]) if names else None


class Sync:
    """Builds or copies images into the registry `to`. After a kill at any moment, it may be run again."""

    def __init__(
        self,
        settings: Settings,
        to: str,
        *,
        fetch_bundle: Callable[[Bundle], bytes],
        semaphore: Semaphore | None = None,
    ) -> None:
        if settings.image_mirror is not None and settings.image_mirror.rstrip("/") == to.rstrip("/"):
            settings = settings.model_copy(update={"image_mirror": None})  # it is the target, not a source
        self._settings = settings
        self._images = Images(settings, fetch_bundle=fetch_bundle, semaphore=semaphore)
        self._book = ImageMetadata(settings)

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    def run(self, items: Iterable[Item], *, jobs: int) -> Iterator[SyncResult]:
        """Yields each result as it ends; `jobs` at a time, independent of each other. Raises: EngineUnavailable."""
        engine = self._engine
        log.debug("sync.begun", engine=engine.url)
        with ThreadPoolExecutor(jobs, thread_name_prefix="sync") as threads:
            try:
                for future in as_completed([threads.submit(self.one, item) for item in items]):
                    yield future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def one(self, item: Item) -> SyncResult:
        """Puts one image into the registry."""
        begun = time.monotonic()
        try:
            outcome, digest = self._one(item, begun + _EACH_S)
        except MegaFlowError as error:
            took_s = time.monotonic() - begun
            return SyncResult(item, SyncOutcome.FAILED, took_s, error=kind_of(error).__name__, message=str(error))
        return SyncResult(item, outcome, time.monotonic() - begun, digest=digest)

    def _one(self, item: Item, deadline: float) -> tuple[SyncOutcome, str]:
        if item.target is None:
            raise ImageUnavailable(f"expected a name that a registry can have, found {item.key}; tag it and name that.")
        registries = Registries(self._engine, self._settings)
        there = registries.look(item.target, deadline)
        if there is not None:
            return SyncOutcome.PRESENT, there
        with self._images.pinned(item.spec, timeout_s=deadline - time.monotonic()) as image_id:
            self._name(image_id, item.key, item.target)
            registries.push(item.target, deadline)
        digest = registries.look(item.target, deadline)
        if digest is None:
            raise ImageUnavailable(f"{item.target} was pushed, but its registry does not have it; is it being cleaned?")
        return (SyncOutcome.COPIED if item.spec.build is None else SyncOutcome.BUILT), digest

    def _name(self, image_id: str, key: str, target: str) -> None:
        repository, tag = parse_repository_tag(target)
        with self._engine.named(f"name {target}", ImageUnavailable):
            self._engine.api.tag(image_id, repository, tag or "latest")
        known = self._book.entry(image_id)
        if known.ours:  # else it was here before: a new name does not make it MegaFlow's
            self._book.made(image_id, key, sorted({*known.names, target}))
