"""Environments in containers of a Docker engine."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import structlog
from docker.errors import APIError, DockerException, NotFound
from docker.types import LogConfig
from requests import RequestException

from app.environments.base import Tags, Times
from app.environments.container import DockerEnvironment
from app.environments.disk import disk_named
from app.environments.engine import ROLE, Engine, engine_of
from app.environments.host_slots import Gate, HostGate, turn
from app.environments.images import Images, host_of
from app.environments.layer import Layer
from app.environments.ways import WAYS, Entrance, Inside, Kinds, Way, WayClosed, choice_for
from app.errors import EnvironmentFailed, ImageUnavailable
from app.models.spec import Bundle, EnvironmentSpec, Network
from app.settings import Settings

__all__ = ["CAP_DROP", "DockerEnvironment", "DockerProvider"]

log = structlog.get_logger()

CAP_DROP = [
    "AUDIT_WRITE",  # writes to the host's audit log
    "MKNOD",  # device files
    "NET_BIND_SERVICE",  # ports below 1024 need no privilege inside: see the sysctl
    "NET_RAW",  # forged packets on a shared bridge
    "SETFCAP",  # privileges on files, which would outlive the process
    "SETPCAP",
    "SYS_CHROOT",
]
"""Taken from the engine's default set. What is left (CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETUID, SETGID) is what
root needs to install packages, change owners and run tests as another user."""


class DockerProvider:
    """Makes containers on the engine of the settings; `gate` bounds how many at a time (None: on this host alone).

    `ways`: which ways into a container are tried, best first.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        fetch_bundle: Callable[[Bundle], bytes],
        gate: Gate | None = None,
        ways: Kinds = WAYS,
    ) -> None:
        self._settings = settings
        self._gate = gate or HostGate(settings.home / "run" / "slots")
        self._images = Images(settings, fetch_bundle=fetch_bundle, gate=self._gate)
        self._ways = ways

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        return self._images.ensure(spec, timeout_s=timeout_s)

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> DockerEnvironment:
        deadline, times = time.monotonic() + timeout_s, Times()
        limit, capacity = f"environment_starts:{host_of(self._engine)}", self._settings.environment_starts
        try:
            with ExitStack() as held:
                with times.measure("image"):
                    image_id = held.enter_context(self._images.kept(spec, timeout_s=timeout_s))
                held.enter_context(self._gate.hold(limit, capacity, timeout_s=deadline - time.monotonic()))
                environment = self._start(spec, tags, image_id, times)
        except TimeoutError as error:
            raise EnvironmentFailed(f"no environment could be started within {timeout_s:.0f} s: {error}.") from error
        try:
            with times.measure("set_up"):
                _set_up(environment, spec, deadline)
        except BaseException:
            environment.destroy()
            raise
        log.info("environment.created", environment=environment.id, image=spec.label)
        return environment

    def _start(self, spec: EnvironmentSpec, tags: Tags, image_id: str, times: Times) -> DockerEnvironment:
        """By the way that is known to lead inside, else by the first that does."""
        choice = choice_for(self._engine, self._settings.home, self._ways)
        closed: WayClosed | None = None
        for way in choice.candidates():
            try:
                environment = self._start_by(way, spec, tags, image_id, times, proven=choice.proven is not None)
            except WayClosed as error:
                log.warning("environment.way_closed", way=type(way).__name__, reason=str(error))
                closed = error
                continue
            choice.prove(way)
            return environment
        raise closed or EnvironmentFailed("no way into a container of this engine is left.")

    def _start_by(
        self, way: Way, spec: EnvironmentSpec, tags: Tags, image_id: str, times: Times, *, proven: bool
    ) -> DockerEnvironment:
        network = self._network(tags.installation) if spec.network is Network.OPEN else "none"
        engine = self._engine
        with engine.named(f"create an environment from {spec.label}", EnvironmentFailed):
            with disk_named("make an environment"):
                entrance = way.entrance()
            container_id = None
            try:
                with times.measure("create"):
                    container_id = self._create(engine, spec, tags, image_id, network, entrance)
                    about = engine.api.inspect_container(container_id)
                user = None if entrance.as_image_says else engine.user_of(image_id)
                inside = Inside(container_id, spec.workdir, user)
                layer = Layer.of(about, {str(mount["Target"]) for mount in entrance.mounts})
                self._images.refuse_unfit(container_id, image_id, spec.label)  # leaves files in the layer
                environment = DockerEnvironment(engine, inside, spec, image_id, entrance, layer, times)
                environment.start(proven=proven)
            except BaseException as error:
                entrance.close()
                with suppress(DockerException, RequestException):
                    if container_id is not None:
                        engine.remove(container_id)
                if isinstance(error, APIError) and way.blamed_for(error):
                    raise WayClosed(f"the engine refuses what this way needs: {error}") from error
                raise
            return environment

    def _create(
        self, engine: Engine, spec: EnvironmentSpec, tags: Tags, image_id: str, network: str, entrance: Entrance
    ) -> str:
        try:
            answer = engine.api.create_container(
                image_id,
                entrypoint=entrance.first_process,
                command=[],
                user=None if entrance.as_image_says else "0",
                name=tags.name(),
                environment=spec.env,
                working_dir=spec.workdir,
                labels={**tags.labels(), ROLE: "environment"},
                healthcheck={"Test": ["NONE"]},
                host_config=self._limits(engine, spec, network, entrance),
            )
        except NotFound as error:
            raise ImageUnavailable(f"image {spec.label} was here and is gone ({image_id}); try again.") from error
        return str(answer["Id"])

    def _limits(self, engine: Engine, spec: EnvironmentSpec, network: str, entrance: Entrance) -> Any:
        resources = spec.resources
        return engine.api.create_host_config(
            init=entrance.needs_init,
            mounts=entrance.mounts,
            network_mode=network,
            nano_cpus=int(min(resources.cpus, engine.cpus) * 1e9),
            mem_limit=resources.memory_bytes,
            memswap_limit=resources.memory_bytes,
            pids_limit=resources.pids,
            cap_drop=CAP_DROP,
            sysctls={"net.ipv4.ip_unprivileged_port_start": "0"},
            security_opt=["no-new-privileges"],
            ipc_mode="private",
            log_config=LogConfig(type="none"),
            oom_score_adj=500,  # a host short of memory ends a task before a worker
        )

    def _network(self, installation: str) -> str:
        """Our own bridge, on which containers do not see each other; made once per installation."""
        name = f"megaflow-{installation}"
        engine = self._engine
        with (
            turn(self._settings.home / "run" / "slots" / "network", timeout_s=60.0),
            engine.named(f"create network {name}", EnvironmentFailed),
        ):
            if not any(found["Name"] == name for found in engine.api.networks(names=[name])):
                engine.api.create_network(
                    name,
                    driver="bridge",
                    options={"com.docker.network.bridge.enable_icc": "false"},
                    labels={"megaflow": installation, ROLE: "environment"},
                    check_duplicate=True,
                )
        return name

    def sweep(self, *, installation: str, keep: Mapping[str, bool] | None = None) -> list[str]:
        """Also removes our network when nothing uses it. Only objects with the role label: instances are not ours."""
        engine, kept = self._engine, keep or {}
        labels = {"label": [f"megaflow={installation}", f"{ROLE}=environment"]}
        removed: list[str] = []
        with engine.named("sweep environments", EnvironmentFailed):
            for container in engine.api.containers(all=True, filters=labels):
                if not kept.get(container["Id"], False):
                    engine.remove(container["Id"])
                    removed.append(container["Id"])
            for network in engine.api.networks(filters=labels):
                with suppress(APIError):  # in use
                    engine.api.remove_network(network["Id"])
                    removed.append(network["Id"])
        return removed


def _set_up(environment: DockerEnvironment, spec: EnvironmentSpec, deadline: float) -> None:
    for command in spec.setup:
        result = environment.run(command, timeout_s=max(0.1, deadline - time.monotonic()))
        if not result.ok:
            how = "ran out of time" if result.timed_out else f"exit code {result.exit_code}"
            raise EnvironmentFailed(f"set-up command {shlex.quote(command)}: {how}: {result.text()[-2000:]}")
