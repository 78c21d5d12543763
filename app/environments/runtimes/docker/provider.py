"""Creates environments as containers of a Docker engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any

import structlog
from docker.errors import APIError, DockerException, NotFound
from docker.types import LogConfig, Mount
from requests import RequestException

from app.environments.contract import Tags, Times
from app.environments.isolation.sizes import size_variables
from app.environments.networks import variables
from app.environments.networks.firewall import open_network
from app.environments.runtimes import hosts_file
from app.environments.runtimes.docker import disk_limits
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.runtimes.docker.setups import Setups
from app.environments.runtimes.session_environment import ended_on_error
from app.environments.runtimes.setup import EnvironmentRequest, HostProvider
from app.environments.session.transports import (
    TRANSPORTS,
    ContainerTarget,
    Transport,
    TransportKinds,
    TransportUnusable,
    candidates,
    prove,
)
from app.environments.tools import Find, Tool, tools_of
from app.errors import EnvironmentFailed, ImageUnavailable, StationError
from app.host.container_layer import ContainerLayer
from app.host.disk import disk_named
from app.host.disk_watch import DiskWatch
from app.host.engine import ROLE, Engine, engine_of
from app.host.privileges import CAP_DROP, cpu_shares
from app.host.slots import Semaphore
from app.images.task_images import Images, host_of
from app.models.spec import Bundle, EnvironmentSpec, Network, Resources, Reuse
from app.settings import Settings

log = structlog.get_logger()


class DockerProvider(HostProvider):
    """Makes containers on the engine of the settings. `transports`: the kinds to try, best first."""

    _environment: Callable[..., DockerEnvironment] = DockerEnvironment

    def __init__(
        self,
        settings: Settings,
        *,
        fetch_bundle: Callable[[Bundle], bytes],
        semaphore: Semaphore | None = None,
        transports: TransportKinds = TRANSPORTS,
        tools: Find | None = None,
    ) -> None:
        super().__init__(settings, fetch_bundle=fetch_bundle, semaphore=semaphore, tools=tools)
        self._images = Images(settings, fetch_bundle=fetch_bundle, semaphore=self._semaphore)
        self._transports = transports
        self._setups = Setups(settings, lambda: self._engine, self._started)

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    @cached_property
    def _watch(self) -> DiskWatch:
        return disk_limits.watch_of(lambda: self._engine, self._settings)

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        return self._images.ensure(spec, timeout_s=timeout_s)

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> DockerEnvironment:
        """Creates an environment; set-up commands run once per image and engine, see `Setups`."""
        deadline, times = time.monotonic() + timeout_s, Times()
        with ExitStack() as held:
            with times.measure("image"):
                image_id = held.enter_context(self._images.pinned(spec, timeout_s=timeout_s))
            times.phases["set_up"] = 0.0
            request = EnvironmentRequest(spec, tags, deadline, times, image_id)
            environment = self._setups.environment(request) if spec.setup else self._started(request, None)
            with ended_on_error(environment):
                environment.bring_tools()  # last, so that they are no part of what a set-up made
        log.info("environment.created", environment=environment.id, image=spec.label)
        return environment

    def _started(self, request: EnvironmentRequest, root: str | None) -> DockerEnvironment:
        """Starts it by the transport that is known to work, else by the first that works. root: see `_start`."""
        with self.start_slot(host_of(self._engine), request.left_s):
            kinds = candidates(self._engine, self._transports)
            for kind in kinds:
                try:
                    environment = self._start(request, root, kind, proven=len(kinds) == 1)
                except TransportUnusable as error:
                    log.warning("environment.transport_unusable", transport=kind.__name__, reason=str(error))
                    if kind is kinds[-1]:
                        raise
                    continue
                if len(kinds) > 1:
                    prove(self._engine, kind)
                break
        return disk_limits.watched(self._watch, environment, request.spec)

    def _start(
        self, request: EnvironmentRequest, root: str | None, kind: type[Transport], *, proven: bool
    ) -> DockerEnvironment:
        """Starts it. root: the image that it is based on, if not the task's. Raises: TransportUnusable."""
        spec, network = request.spec, self._network(request.spec, request.tags)
        engine, tools = self._engine, tools_of(spec, self._find)
        with engine.named(f"create an environment from {spec.label}", EnvironmentFailed):
            with disk_named("make an environment"):
                transport = kind(engine, self._settings.home)
            container_id = None
            try:
                with request.times.measure("create"):
                    container_id = self._create(request, root or request.image_id, network, transport, tools)
                    about = engine.api.inspect_container(container_id)
                    if network is None:
                        hosts_file.write(engine, about)
                inside = ContainerTarget(container_id, spec.workdir, self._user(engine, request.image_id))
                layer = ContainerLayer.of(about, {str(mount["Target"]) for mount in _mounts(transport, tools)})
                self._images.refuse_unfit(container_id, request.image_id, spec.label)  # leaves files in the layer
                environment = self._environment(
                    *(engine, inside, request, transport, layer, tools),
                    name=str(about["Name"]).lstrip("/"),
                    alone=network is None,
                )
                environment.start(proven=proven)
            except BaseException as error:
                transport.close()
                with suppress(DockerException, RequestException, StationError):  # the sweeper removes what stays
                    if container_id is not None:
                        engine.remove(container_id)
                if isinstance(error, APIError) and kind.blamed_for(error):
                    raise TransportUnusable(f"the engine refuses what this transport needs: {error}") from error
                raise
            return environment

    def _create(
        self,
        request: EnvironmentRequest,
        image_id: str,
        network: str | None,
        transport: Transport,
        tools: tuple[Tool, ...],
    ) -> str:
        engine, spec, tags = self._engine, request.spec, request.tags
        try:
            answer = engine.api.create_container(
                image_id,
                entrypoint=transport.first_process,
                command=[],
                user="0",
                name=tags.name(),
                environment={**size_variables(spec.resources, engine.cpus), **self._variables(spec), **spec.env},
                working_dir=spec.workdir,
                labels=self._labels(tags),
                healthcheck={"Test": ["NONE"]},
                host_config=self._limits(spec, network, _mounts(transport, tools)),
                network_disabled=network is None,
                **self._joining(),
            )
        except NotFound as error:
            self._images.forget(spec)
            raise ImageUnavailable(f"image {spec.label} was here and is gone ({image_id}); try again.") from error
        return str(answer["Id"])

    def _limits(self, spec: EnvironmentSpec, network: str | None, mounts: list[Mount]) -> Any:
        options = container_limits(self._engine, spec.resources)
        return self._engine.api.create_host_config(
            mounts=mounts,
            network_mode=network or "none",
            log_config=LogConfig(type="none"),
            **options,
            **disk_limits.limits(self._engine, spec),
        )

    def _user(self, engine: Engine, image_id: str) -> str | None:
        """Returns the user of commands, where we choose it; None: root."""
        return engine.user_of(image_id)

    def _labels(self, tags: Tags) -> dict[str, str]:
        return {**tags.labels(), ROLE: "environment"}

    def _variables(self, spec: EnvironmentSpec) -> dict[str, str]:
        return variables(spec)

    def _joining(self) -> dict[str, Any]:
        """Returns more creation options for a container that is one of several: see `compose`."""
        return {}

    def _network(self, spec: EnvironmentSpec, tags: Tags) -> str | None:
        """Returns the network of the container; None: it needs none of the engine, see `hosts_file`."""
        if spec.network is Network.OPEN:
            return open_network(self._engine, self._settings, tags.installation)
        return "none" if spec.reuse is Reuse.SHARED_READONLY else None  # only the engine can write its files


def container_limits(engine: Engine, resources: Resources) -> dict[str, Any]:
    """Returns what a host configuration says of every container of a task: resources and privileges."""
    most = resources.most
    return {
        "cpu_shares": cpu_shares(resources),
        "nano_cpus": int(min(most.cpus, engine.cpus) * 1e9),
        "mem_limit": most.memory_bytes,
        "memswap_limit": most.memory_bytes,
        "pids_limit": resources.pids,
        "cap_drop": CAP_DROP,
        "sysctls": {"net.ipv4.ip_unprivileged_port_start": "0"},
        "security_opt": ["no-new-privileges"],
        "ipc_mode": "private",
        "oom_score_adj": 500,  # a host short of memory ends a task before a worker
    }


def _mounts(transport: Transport, tools: tuple[Tool, ...]) -> list[Mount]:
    shown = tools if transport.shares_files else ()
    return [*transport.mounts, *(Mount(tool.target, str(tool.folder), type="bind", read_only=True) for tool in shown)]
