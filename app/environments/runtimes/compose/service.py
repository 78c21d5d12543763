"""Runs a service next to the main container, with the same limits and hardening."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import NotFound
from docker.types import LogConfig

from app.compose_file.model import Condition, HealthCheck, Service
from app.compose_file.plan import resources_of
from app.environments.contract import ServiceMemory
from app.environments.runtimes.compose.resources import ComposeResources
from app.environments.runtimes.docker import disk_limits
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.runtimes.docker.provider import container_limits
from app.environments.session.client import SessionClient
from app.environments.session.transports import exec_stream
from app.errors import EnvironmentFailed, ImageUnavailable, ServiceUnhealthy, StationError
from app.host import archives
from app.host.cgroup_counts import MemoryWatch, container_memory_events
from app.host.container_layer import usage_of
from app.host.disk import DiskUsage
from app.models.shell import OutputLogs

_HELPER = "/.megaflow-helper"
_FIRST_LOOK_S = 0.05
_LOOK_S = 1.0
"""Maximum pause between checks; an engine checks a service's health only at the file's interval, often 30 s."""
_TAIL_CHARACTERS = 2000
_LOG_BYTES = "2m"
_LOG_FILES = "2"
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ServiceState:
    """State of a service, as an attempt records it."""

    name: str
    id: str
    image: str
    state: str
    exit_code: int | None = None  # once it has ended
    health: str | None = None
    out_of_memory: bool = False


@dataclass
class ServiceContainer:
    """A container of the project. `ComposeResources` removes it."""

    resources: ComposeResources
    service: Service
    image_id: str
    helper: Path
    """The session's helper on this host; in the container each connection starts it anew."""

    def __post_init__(self) -> None:
        self.id = ""
        self._session: SessionClient | None = None
        self._healthy = False
        self._check_output = ""  # of the last health check that ran here
        self._memory = MemoryWatch(None, lambda: None)
        self._memory_kills = 0  # for its memory limit, as far as known
        self._host_kills = 0  # because the host lacked memory

    def start(self) -> None:
        """Makes and starts it. Raises: ServiceUnhealthy: it cannot be started; EnvironmentFailed, ImageUnavailable."""
        engine, name = self.resources.engine, self.service.name
        self._healthy, self._check_output = False, ""
        with engine.named(f"start service {name}", EnvironmentFailed):
            self.id = self._create()
            self.resources.join_others(self.service, self.id)
            for one in self.resources.plan.copies[name]:
                engine.api.put_archive(self.id, "/", one.at_root)
            engine.api.put_archive(self.id, "/", archives.of_file(_HELPER, self.helper.read_bytes(), mode=0o755))
            with engine.named(f"start service {name!r}", ServiceUnhealthy):  # nothing to execute, no such user
                engine.api.start(self.id)
            about = engine.api.inspect_container(self.id)
        self._session = session = self._opened(about["Config"].get("WorkingDir") or "/")
        self._memory.close()
        self._memory_kills = self._host_kills = 0
        self._memory = MemoryWatch(
            container_memory_events(self.id, about["State"]["Pid"]), lambda: session.stats().oom_kills
        )

    def _opened(self, workdir: str) -> SessionClient:
        """Returns a session as the service's own user, which cannot become another."""
        engine, identity = self.resources.engine, self.id
        return SessionClient(
            lambda: exec_stream(engine, identity, [_HELPER, "--stdio"], user=""),
            label=identity[:12],
            cwd=workdir,
            ended=self.resources.raise_if_ended,
        )

    def _create(self) -> str:
        service, api = self.service, self.resources.engine.api
        try:
            container = api.create_container(
                self.image_id,
                command=list(service.command) if service.command is not None else None,
                entrypoint=list(service.entrypoint) if service.entrypoint is not None else None,
                user=service.user,
                hostname=service.hostname,
                name=self.resources.tags.name(),
                environment=service.variables,
                working_dir=service.working_dir,
                labels=self.resources.labels(service.name),
                healthcheck=_engine_check(service.healthcheck),
                host_config=self.resources.host_config_of(self._limits(), service),
                **self.resources.first_network(service),
            )
        except NotFound as error:
            raise ImageUnavailable(f"the image of {service.name} was here and is gone; try again.") from error
        return str(container["Id"])

    def _limits(self) -> Any:
        engine, service = self.resources.engine, self.service
        own = resources_of(service, self.resources.spec.resources)
        return engine.api.create_host_config(
            init=service.init,
            network_mode=self.resources.network_of(service),
            log_config=LogConfig(type="local", config={"max-size": _LOG_BYTES, "max-file": _LOG_FILES}),
            **container_limits(engine, own),
            **disk_limits.bounds(engine, self.resources.spec),
        )

    def wait_ready(self, awaited: set[Condition], stop: threading.Event, deadline: float) -> Condition:
        """Waits until it is as others need it, and healthy if it has a check. Returns the condition reached.

        Raises: ServiceUnhealthy: it ended, is unhealthy, or was not ready by `deadline` (monotonic), with its log.
        """
        pause_s = _FIRST_LOOK_S
        while not stop.is_set():
            about = self._about()
            if not about["State"]["Running"]:
                return self._after_end(about["State"], awaited)
            if Condition.COMPLETED not in awaited and self._ready(about, awaited, deadline):
                return Condition.HEALTHY if self._healthy else Condition.STARTED
            if time.monotonic() >= deadline:
                goal = "ended" if Condition.COMPLETED in awaited else "healthy"
                raise self.failure(f"was not {goal} in time", about["State"])
            stop.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(_LOOK_S, pause_s * 1.5)
        return Condition.STARTED

    def _after_end(self, state: dict[str, Any], awaited: set[Condition]) -> Condition:
        if state["ExitCode"] != 0 or Condition.HEALTHY in awaited:
            raise self.failure("ended", state)
        return Condition.COMPLETED

    def _ready(self, about: dict[str, Any], awaited: set[Condition], deadline: float) -> bool:
        """Whether it is healthy (engine's status, or its check run here) or has no check. Raises: ServiceUnhealthy."""
        check = about["Config"].get("Healthcheck") or {}
        test = list(check.get("Test") or [])
        if not test or test[0] == "NONE":
            if Condition.HEALTHY in awaited:
                raise self.failure("has no health check that others could wait for", about["State"])
            return True
        status = (about["State"].get("Health") or {}).get("Status")
        if status == "unhealthy":
            raise self.failure("is unhealthy", about["State"])
        timeout_s = min((check.get("Timeout") or 30 * _NS) / _NS, max(0.1, deadline - time.monotonic()))
        self._healthy = status == "healthy" or self._check(test, timeout_s)
        return self._healthy

    def _check(self, test: list[str], timeout_s: float) -> bool:
        argv = ["/bin/sh", "-c", test[1]] if test[0] == "CMD-SHELL" else test[1:]
        try:
            result = self.session.run(argv, timeout_s=timeout_s)
        except EnvironmentFailed:  # it is ending: the next check shows how
            return False
        self._check_output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
        return result.ok

    def failure(self, what: str, state: dict[str, Any]) -> ServiceUnhealthy:
        """Builds the error with all that helps: exit code, output of the last health check, end of the log."""
        ended = "" if state["Running"] else f" with exit code {state['ExitCode']}"
        memory = ", out of memory" if self.memory.kills else ""
        checks = (state.get("Health") or {}).get("Log") or []
        output = (str(checks[-1].get("Output", "")).strip() if checks else "") or self._check_output
        health = f"\nIts last health check said: {output[-_TAIL_CHARACTERS:]}" if output else ""
        tail = self.log().decode("utf-8", "replace")[-_TAIL_CHARACTERS:].strip()
        return ServiceUnhealthy(
            f"service {self.service.name!r} {what}{ended}{memory}.{health}\nIts log ends with: {tail or '(nothing)'}"
        )

    @property
    def session(self) -> SessionClient:
        """Raises: EnvironmentFailed: it has not been started."""
        if self._session is None:
            raise EnvironmentFailed(f"service {self.service.name!r} has not been started.")
        return self._session

    def refuse_ended(self) -> None:
        """Raises: ServiceUnhealthy: it has ended with a failure."""
        state = self._about()["State"]
        if not state["Running"] and state["ExitCode"] != 0:
            raise self.failure("ended", state)

    @property
    def memory(self) -> ServiceMemory:
        """Memory limit, and kills since its start: the highest counts seen."""
        count = None
        with suppress(StationError):
            count = self._memory.count()
        with suppress(StationError):
            if count is None:  # its cgroup has ended with it: the engine knows of its first process
                count = int(bool(self._about()["State"].get("OOMKilled")))
        self._memory_kills = max(self._memory_kills, count or 0)
        self._host_kills = max(self._host_kills, self._memory.host_kills() or 0)
        most = resources_of(self.service, self.resources.spec.resources).most
        return ServiceMemory(most.memory_bytes, self._memory_kills, self._host_kills)

    def state(self) -> ServiceState:
        """Raises: EnvironmentFailed, EngineUnavailable."""
        state = self._about()["State"]
        health = (state.get("Health") or {}).get("Status")
        return ServiceState(
            self.service.name,
            self.id,
            self.resources.plan.images[self.service.name].label,
            state["Status"],
            None if state["Running"] else state["ExitCode"],
            "healthy" if self._healthy and health == "starting" else health,
            self.memory.kills > 0,
        )

    def log(self) -> bytes:
        """Returns its output, of much the end; empty if it is gone. Raises: EnvironmentFailed, EngineUnavailable."""
        if not self.id:
            return b""
        engine = self.resources.engine
        try:
            with engine.named(f"read the log of {self.service.name}", EnvironmentFailed):
                return bytes(engine.api.logs(self.id, stdout=True, stderr=True, tail=20_000))
        except EnvironmentFailed as error:
            if isinstance(error.__cause__, NotFound):
                return b""
            raise

    def keep_logs(self, logs: OutputLogs | None) -> None:
        """Stores the long outputs of commands that run here in `logs`."""
        if self._session is not None:
            self._session.logs = logs

    def close(self) -> None:
        """Ends our processes inside; the container is not touched."""
        if self._session is not None:
            self._session.close()
        self._memory.close()

    def _about(self) -> dict[str, Any]:
        engine = self.resources.engine
        with engine.named(f"look at service {self.service.name}", EnvironmentFailed):
            about: dict[str, Any] = engine.api.inspect_container(self.id)
            return about


def _engine_check(check: HealthCheck | None) -> dict[str, Any] | None:
    if check is None:
        return None
    if check.disabled:
        return {"Test": ["NONE"]}
    return {
        "Test": list(check.test),
        "Interval": int(check.interval * _NS),
        "Timeout": int(check.timeout * _NS),
        "StartPeriod": int(check.start_period * _NS),
        "Retries": check.retries,
    }


class ProjectDisk:
    """Disk usage of a project for the disk watch, from before its first container to its end. `main`: once there."""

    def __init__(self, resources: ComposeResources, others: Iterable[ServiceContainer]) -> None:
        self._resources = resources
        self._others = tuple(others)
        self._ended = threading.Event()
        self.main: DockerEnvironment | None = None

    @property
    def id(self) -> str:
        """Id of the environment; until there is one, of the project."""
        return self._resources.id if self.main is None else self.main.id

    @property
    def gone(self) -> bool:
        return self._ended.is_set() or self._resources.end_reason is not None

    def end(self) -> None:
        """Stops the watch."""
        self._ended.set()

    def written(self) -> DiskUsage:
        """Raises: EnvironmentFailed, EngineUnavailable."""
        engine, containers = self._resources.engine, self._resources.created().containers
        with engine.named("look where services write", EnvironmentFailed):
            details = [engine.api.inspect_container(one) for one in containers]
        return usage_of(engine, details)

    def fail(self, why: str, *, kind: type[EnvironmentFailed] = EnvironmentFailed) -> None:
        """Ends all that runs; all later calls raise `why`. Its owner still destroys it."""
        self._resources.end_reason = (kind, why)
        try:
            if self.main is not None:
                self.main.fail(why, kind=kind)
        finally:
            for other in self._others:
                other.close()
            self._resources.kill()
