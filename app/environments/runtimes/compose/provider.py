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
from app.images.task_images import Images
from app.models.spec import Bundle, EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

_PLANS = 8


class ComposeProvider(HostProvider):
    """Makes projects on the engine of the settings."""

    def __init__(self, settings: Settings, **options: Unpack[ProviderOptions]) -> None:
        super().__init__(settings, **options)
        self._plans: OrderedDict[str, ComposePlan] = OrderedDict()  # the last few: bundles are not small
        self._lock = threading.Lock()

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    @cached_property
    def _watch(self) -> DiskWatch:
        return disk_limits.watch_of(lambda: self._engine, self._settings)

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Prepares all images; the result distinguishes this project from others. Raises: SpecInvalid, too."""
        plan = self._plan(spec)
        with self._held_images(plan, self._images(plan), time.monotonic() + timeout_s) as image_ids:
            parts = [str(spec.compose and spec.compose.model_dump_json())]
            parts += [f"{name}={image_id}" for name, image_id in sorted(image_ids.items())]
            return f"compose:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}"

    @contextmanager
    def _held_images(self, plan: ComposePlan, images: Images, deadline: float) -> Iterator[dict[str, str]]:
        """Yields image ids by service; the images stay on the engine for the length of the block."""
        with ExitStack() as held:
            yield {
                name: held.enter_context(images.pinned(part, timeout_s=deadline - time.monotonic()))
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
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return plan

    def _images(self, plan: ComposePlan) -> Images:
        """Returns the engine's images, which find the plan's own build contexts."""

        def fetch(bundle: Bundle) -> bytes:
            return plan.contexts.get(bundle.sha256) or self._fetch_bundle(bundle)

        return Images(self._settings, fetch_bundle=fetch, semaphore=self._semaphore)

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> ComposeEnvironment:
        """Creates networks, volumes and services, ready as the file says; set-up commands run last, in the main one."""
        deadline, times, plan = time.monotonic() + timeout_s, Times(), self._plan(spec)
        images = self._images(plan)
        with ExitStack() as held:
            with times.measure("image"):
                image_ids = held.enter_context(self._held_images(plan, images, deadline))
            resources = ComposeResources(self._engine, plan, spec, tags)
            start = ProjectStart(
                self._settings,
                images,
                self._semaphore,
                self._watch,
                resources,
                image_ids,
                times,
                self._find,
                timeout_s,
            )
            try:
                environment = start.environment(deadline)
            except BaseException:
                start.remove()
                raise
        log.info("environment.created", environment=environment.id, image=spec.label, services=len(image_ids))
        return environment
