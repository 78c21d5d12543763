"""Creates environments by an OCI runtime, without a daemon."""

from __future__ import annotations

import time
import uuid
from functools import cached_property
from pathlib import Path
from typing import Unpack

import structlog

from app.environments.contract import Route, Tags
from app.environments.prebuilt import binary
from app.environments.runtimes.oci.environment import OciEnvironment
from app.environments.runtimes.oci.instance import OciHost, usage_of
from app.environments.runtimes.oci.probe import available
from app.environments.runtimes.oci.runtime import runtime_of
from app.environments.runtimes.session_environment import ended_on_error
from app.environments.runtimes.setup import (
    EnvironmentRequest,
    HostProvider,
    ProviderOptions,
    carry_out,
    refuse_read_only,
    setup_key,
    setup_turn,
)
from app.environments.tools import tools_of
from app.errors import (
    EnvironmentFailed,
    EnvironmentVanished,
    ImageUnavailable,
)
from app.host.disk import DiskUsage
from app.host.disk_watch import DiskWatch, limit_of
from app.host.environment_records import Record, Records
from app.images.layer_store import ImageStore, StoredImage
from app.images.unpacked_images import OciImages
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings

log = structlog.get_logger()


class OciProvider(HostProvider):
    """Makes environments on this host, by its OCI runtime."""

    def __init__(self, settings: Settings, **options: Unpack[ProviderOptions]) -> None:
        super().__init__(settings, **options)
        self._home = settings.home.resolve()
        self._images = OciImages(
            settings, ImageStore(self._home), fetch_bundle=self._fetch_bundle, semaphore=self._semaphore
        )
        self._watch = watch_of(self._home)

    @cached_property
    def _site(self) -> OciHost:
        runtime = runtime_of()
        why_not = available(self._settings)
        if why_not is not None or runtime is None:
            raise EnvironmentFailed(f"environments of the kind `oci` cannot be made here: {why_not}; use `docker`.")
        return OciHost.of(self._home, runtime, binary(self._home))

    @property
    def store(self) -> ImageStore:
        """The unpacked images."""
        return self._site.store

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        return self._images.ensure(spec, timeout_s=timeout_s).id

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> OciEnvironment:
        """Creates an environment; set-up commands run once per image and host, their result is kept as a layer."""
        _refuse_open(spec)
        request = EnvironmentRequest(spec, tags, time.monotonic() + timeout_s)
        with request.times.measure("image"):
            image = self._images.ensure(spec, timeout_s=timeout_s)
        if not spec.setup:
            request.times.phases["set_up"] = 0.0
            return self._started(request, image)
        key = setup_key(spec, image.id)
        if (cached := self._from_cached(request, key)) is not None:
            return cached
        if not self.store.is_unkept(key):
            with setup_turn(self._settings.home / "run" / "slots" / f"oci-setup-{key[:24]}", request):
                if (cached := self._from_cached(request, key)) is not None:
                    return cached
                if not self.store.is_unkept(key):
                    return self._first_of_its_kind(request, key, image)
        refuse_read_only(spec, "that was found before")
        return self._set_up(request, image)

    def _from_cached(self, request: EnvironmentRequest, key: str) -> OciEnvironment | None:
        """Starts from the result of an earlier identical set-up; None when there is none."""
        snapshot = self._site.store.snapshot(key)
        if snapshot is None:
            return None
        request.times.route = Route.SNAPSHOT
        request.times.phases["set_up"] = 0.0
        return self._started(request, snapshot)

    def _first_of_its_kind(self, request: EnvironmentRequest, key: str, image: StoredImage) -> OciEnvironment:
        """Runs the set-up and keeps its result, if that is nothing but files."""
        environment = self._set_up(request, image)
        with ended_on_error(environment), request.times.measure("set_up"):
            if (reason := environment.keep(key)) is not None:
                self.store.note_unkept(key, image.id)
                log.info("environment.setup_not_cached", environment=environment.id, reason=reason)
                refuse_read_only(request.spec, reason)
        return environment

    def _set_up(self, request: EnvironmentRequest, image: StoredImage) -> OciEnvironment:
        environment = self._started(request, image, set_up=True)
        with ended_on_error(environment), request.times.measure("set_up"):
            carry_out(request.spec.setup, environment, request.deadline)
            environment.note_set_up_done()
        return environment

    def _started(self, request: EnvironmentRequest, image: StoredImage, *, set_up: bool = False) -> OciEnvironment:
        with self.start_slot(self._settings.host(), request.left_s), request.times.measure("create"):
            environment = self._start(request, image, set_up=set_up)
        self._watch.watch(environment, limit_of(request.spec))
        log.info("environment.created", environment=environment.id, image=request.spec.label)
        return environment

    def _start(self, request: EnvironmentRequest, image: StoredImage, *, set_up: bool) -> OciEnvironment:
        site, identity, spec = self._site, uuid.uuid4().hex, request.spec
        tools = tools_of(spec, self._find)
        with site.store.in_use():
            if not all(site.store.has_layer(name) for name in image.layers):
                raise ImageUnavailable(f"image {spec.label} was here and is gone ({image.id}); try again.")
            site.records.write(Record(identity, request.tags.labels(), spec.label, image.id, image.layers))
        environment = OciEnvironment(site, identity, spec, image, request.times, tools)
        if set_up:
            environment.mark_set_up()
        with ended_on_error(environment):
            environment.start(deadline=request.deadline)
            if not site.records.exists(identity):  # a sweeper ran meanwhile, and could not see all of it
                raise EnvironmentVanished(f"environment {identity[:12]} was removed while it started.")
        return environment


def _refuse_open(spec: EnvironmentSpec) -> None:
    if spec.network is Network.OPEN:
        raise EnvironmentFailed(
            "expected the network `none`, `model-only` or `allowlist` for the kind `oci`, found `open`, which takes a "
            "container engine: use `docker` where there is one, or name the hosts that it may reach (`allowlist`)."
        )


def watch_of(home: Path) -> DiskWatch:
    """Watches what this process's environments write, and all processes' where the disk is nearly full."""

    def sizes() -> dict[str, DiskUsage]:
        records = Records(home)
        return {one.id: usage_of(one.id, records.place(one.id)) for one in records.all()}

    return DiskWatch(home, home / "run" / "slots" / "oci-disk-watch", sizes)
