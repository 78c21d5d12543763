"""Creates environments of several containers on a Docker engine."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Unpack

import structlog

from app.compose_file.plan import ComposePlan, planned
from app.environments.contract import Tags, Times
from app.environments.runtimes.compose.environment import ComposeEnvironment
from app.environments.runtimes.compose.resources import ComposeResources
from app.environments.runtimes.compose.start import ProjectStart
from app.environments.runtimes.docker import disk_limits
from app.environments.runtimes.setup import HostProvider, ProviderOptions
from app.host.disk_watch import DiskWatch
from app.host.engine import Engine, engine_of
from app.images.compose_images import note_parts
from app.images.metadata import ImageMetadata
from app.images.task_images import Images
from app.models.spec import Bundle, EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

_PLANS = 8


class ComposeProvider(HostProvider):
    """Makes projects on the engine of the settings."""

    def __init__(self, settings: Settings, **options: Unpack[ProviderOptions]) -> None:
        super().__init__(settings, **options)
        self._images = Images(settings, fetch_bundle=self._fetch, semaphore=self._semaphore)
        self._plans: OrderedDict[str, ComposePlan] = OrderedDict()  # the last few: bundles are not small
        self._plans_in_use: list[ComposePlan] = []  # also when they have left `_plans`
        self._lock = threading.Lock()

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    @cached_property
    def _watch(self) -> DiskWatch:
        return disk_limits.watch_of(lambda: self._engine, self._settings)

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Prepares all images; the result distinguishes this project from others. Raises: SpecInvalid, too."""
        with self._held_images(self._plan(spec), time.monotonic() + timeout_s) as image_ids:
            parts = [str(spec.compose and spec.compose.model_dump_json())]
            parts += [f"{name}={image_id}" for name, image_id in sorted(image_ids.items())]
            return f"compose:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}"

    @contextmanager
    def _held_images(self, plan: ComposePlan, deadline: float) -> Iterator[dict[str, str]]:
        """Yields image ids by service; the images stay on the engine for the length of the block."""
        with ExitStack() as held:
            held.enter_context(self._used(plan))
            yield {
                name: held.enter_context(self._images.pinned(part, timeout_s=deadline - time.monotonic()))
                for name, part in plan.images.items()
            }

    def _plan(self, spec: EnvironmentSpec) -> ComposePlan:
        """Returns the plan, cached by the whole spec: the images of a plan carry all of it except their sources."""
        key = spec.model_dump_json()
        with self._lock:
            known = self._plans.get(key)
        if known is not None:
            return known
        plan = planned(spec, self._fetch_bundle, self._settings.home / "cache" / "contexts")
        note_parts(ImageMetadata(self._settings), spec, plan)
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return plan

    @contextmanager
    def _used(self, plan: ComposePlan) -> Iterator[None]:
        with self._lock:
            self._plans_in_use.append(plan)
        try:
            yield
        finally:
            with self._lock:  # by identity, not by equality
                del self._plans_in_use[next(place for place, one in enumerate(self._plans_in_use) if one is plan)]

    def _fetch(self, bundle: Bundle) -> bytes:
        with self._lock:
            plans = list(self._plans_in_use)
        for plan in plans:
            if bundle.sha256 in plan.contexts:
                return plan.contexts[bundle.sha256]
        return self._fetch_bundle(bundle)

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> ComposeEnvironment:
        """Creates networks, volumes and services, ready as the file says; set-up commands run last, in the main one."""
        deadline, times, plan = time.monotonic() + timeout_s, Times(), self._plan(spec)
        with ExitStack() as held:
            with times.measure("image"):
                images = held.enter_context(self._held_images(plan, deadline))
            resources = ComposeResources(self._engine, plan, spec, tags)
            start = ProjectStart(
                self._settings,
                self._images,
                self._semaphore,
                self._watch,
                resources,
                images,
                times,
                self._find,
                timeout_s,
            )
            try:
                environment = start.environment(deadline)
            except BaseException:
                start.remove()
                raise
        log.info("environment.created", environment=environment.id, image=spec.label, services=len(images))
        return environment
