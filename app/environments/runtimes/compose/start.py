"""Starts a project: networks and volumes, services in order of their dependencies, set-up commands.

The main service is a container as in every environment, with a session, but on the project's networks.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import structlog
from docker.types import Mount

from app.compose_file.file import Project
from app.compose_file.model import Condition, Service
from app.compose_file.values import idle
from app.environments.contract import Tags, Times
from app.environments.networks import exempted, variables
from app.environments.runtimes.compose.environment import LOG, ComposeEnvironment
from app.environments.runtimes.compose.resources import ComposeResources
from app.environments.runtimes.compose.service import ProjectDisk, ServiceContainer
from app.environments.runtimes.docker import disk_limits
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.runtimes.setup import EnvironmentRequest, carry_out
from app.environments.session.transports import Transport, binary_for
from app.environments.tools import Find, Tool
from app.errors import EnvironmentFailed, ServiceUnhealthy, StationError
from app.host.disk_watch import DiskWatch, limit_of
from app.host.engine import Engine
from app.host.slots import Semaphore
from app.images.task_images import Images, host_of
from app.models.spec import EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

_PAUSE_S = 0.2
_TAIL_CHARACTERS = 2000
_START = f"""\
[ -d /var/tmp ] || mkdir -p /var/tmp
: >{LOG} || exit
{{{{ trap '' HUP; exec {{command}}; }}}} >{LOG} 2>&1 </dev/null &
sleep 0.2 2>/dev/null || sleep 1
state=
{{{{ read -r state </proc/$!/stat; }}}} 2>/dev/null
case $state in '' | *') Z '*) ;; *) exit 0 ;; esac
wait $!
code=$?
case $code in 126 | 127) exit $code ;; esac
"""
"""Starts a command in the background, and exits with its exit code when there was nothing to execute.

After a moment, a command that runs is not awaited longer: what exit code it has later does not count.
"""
_LOOK_S = 0.2


class ProjectStart:
    """Creates one environment, or leaves nothing."""

    def __init__(
        self,
        settings: Settings,
        images: Images,
        semaphore: Semaphore,
        watch: DiskWatch,
        resources: ComposeResources,
        image_ids: dict[str, str],
        times: Times,
        tools: Find | None,
        start_s: float,
    ) -> None:
        """start_s: time limit of another start, after a reset."""
        self._settings = settings
        self._resources = resources
        self._image_ids = image_ids
        self._times = times
        self._project = resources.plan.project
        self._main: ComposeEnvironment | None = None
        helper = binary_for(resources.engine, settings.home)
        self._others = {
            name: ServiceContainer(resources, one, image_ids[name], helper)
            for name, one in self._project.services.items()
            if name != self._project.main
        }
        self._watch = watch
        self._disk = ProjectDisk(resources, self._others.values())
        made = partial(ComposeEnvironment, resources, self._others, self._disk, self._start_again, start_s)
        self._provider = MainContainerProvider(settings, images, semaphore, resources, watch, tools, made)

    def environment(self, deadline: float) -> ComposeEnvironment:
        """Creates the environment. deadline: monotonic.

        Raises: ServiceUnhealthy: names the one at fault; SetupFailed, SetupTimedOut, NoPlaceToStart;
            EnvironmentFailed; EngineUnavailable.
        """
        if disk_limits.in_sight(self._resources.engine):  # else it cannot be watched from here
            self._watch.watch(self._disk, limit_of(self._resources.spec))
        try:
            return self._create_environment(deadline)
        except StationError:
            self._resources.raise_if_ended()  # the real reason
            raise

    def _create_environment(self, deadline: float) -> ComposeEnvironment:
        with self._times.measure("network"):
            self._resources.create(self._settings)
        with self._times.measure("services"):
            order = StartOrder(
                self._project, self._others, lambda: self._start_slot(deadline), lambda: self._start_main(deadline)
            )
            order.carry_out(deadline)
        assert self._main is not None
        with self._main.times.measure("set_up"):
            # Not by the main container's own provider, whose snapshots know nothing of the other services.
            carry_out(self._resources.spec.setup, self._main, deadline)
        self._main.note_set_up_done()
        self._sum_phases(self._main.times.phases)
        self._resources.raise_if_ended()
        return self._main

    def _sum_phases(self, phases: dict[str, float]) -> None:
        """Makes the main container's phases those of the project: it starts when the last service is ready."""
        own = self._times.phases
        within = phases.get("image", 0.0) + phases.get("create", 0.0) + phases.get("session", 0.0)
        phases["image"] = own["image"]
        phases["create"] = phases.get("create", 0.0) + own["network"]
        phases["start"] = max(phases.get("start", 0.0), own["services"] - within)

    def remove(self) -> None:
        """Removes all of it; leaves to the sweeper what cannot be removed now."""
        self._disk.end()
        for other in self._others.values():
            other.close()
        try:
            if self._main is not None:
                with suppress(StationError):
                    self._main.destroy()
            self._resources.remove()
        except StationError as error:
            log.warning("environment.project_stays", project=self._resources.id, reason=str(error))

    def _start_slot(self, deadline: float) -> AbstractContextManager[None]:
        return self._provider.start_slot(host_of(self._resources.engine), deadline - time.monotonic())

    def _start_main(self, deadline: float) -> None:
        plan, spec = self._resources.plan, self._resources.spec
        service = plan.main
        image = plan.images[service.name]  # the rest comes from this task's spec: the plan may be from another task
        environment = {**service.variables, **spec.env}
        part = spec.model_copy(
            update={"compose": None, "image": image.image, "build": image.build, "setup": (), "env": environment}
        )
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ServiceUnhealthy(f"service {service.name!r} was not started in time: the others took all of it.")
        main = self._provider.create(part, self._resources.tags, timeout_s=left_s)
        assert isinstance(main, ComposeEnvironment)
        self._main = self._disk.main = main
        self._watch.forget(self._main)  # it is watched as a part of the project
        self._resources.raise_if_ended()  # it may have ended before `main` was set
        start_inside(self._main, self._resources, self._image_ids[service.name], deadline)

    def _start_again(self, deadline: float) -> None:
        """Starts the others, and what the main service runs of its own: it has just been reset."""
        assert self._main is not None
        StartOrder(self._project, self._others, lambda: self._start_slot(deadline), None).carry_out(deadline)
        start_inside(self._main, self._resources, self._image_ids[self._project.main], deadline)
        self._main.note_set_up_done()


class StartOrder:
    """A start of a project.

    slot: holds a slot among the containers that start now; the calling thread takes it once for each wave.
    start_main: starts the main service in the calling thread and waits until it is healthy; None: it runs already.
    """

    def __init__(
        self,
        project: Project,
        others: dict[str, ServiceContainer],
        slot: Callable[[], AbstractContextManager[None]],
        start_main: Callable[[], None] | None,
    ) -> None:
        self._project = project
        self._others = others
        self._start_slot = slot
        self._start_main = start_main
        self._reached: dict[str, set[Condition]] = {}
        self._watched: dict[Future[Condition], str] = {}
        self._stop = threading.Event()

    def carry_out(self, deadline: float) -> None:
        """Raises: ServiceUnhealthy: names the service that ended, is unhealthy, or was not ready by `deadline`."""
        waiting = set(self._project.services)
        if self._start_main is None:
            waiting.discard(self._project.main)
            self._reached[self._project.main] = {Condition.STARTED, Condition.HEALTHY}
        with ThreadPoolExecutor(max(1, len(self._others))) as pool:
            try:
                while waiting or self._watched:
                    waiting -= self._start_ready(waiting, pool, deadline)
                    self._note_ready(waiting, deadline)
                for other in self._others.values():
                    other.refuse_ended()
            finally:
                self._stop.set()
                if self._watched:  # do not wait for a check that hangs
                    for other in self._others.values():
                        other.close()

    def _start_ready(self, waiting: set[str], pool: ThreadPoolExecutor, deadline: float) -> set[str]:
        ready = [name for name in self._project.services if name in waiting and self._may_start(name)]
        others = [name for name in ready if name in self._others]
        if others:
            with self._start_slot():
                for start in [pool.submit(self._others[name].start) for name in others]:
                    start.result()
            for name in others:
                awaited = self._project.awaited(name)
                self._reached[name] = {Condition.STARTED}
                self._watched[pool.submit(self._others[name].wait_ready, awaited, self._stop, deadline)] = name
            return set(others)
        if ready and self._start_main is not None:
            self._start_main()
            self._reached[self._project.main] = {Condition.STARTED, Condition.HEALTHY}
        return set(ready)

    def _may_start(self, name: str) -> bool:
        needs = self._project.waits_for(name).items()
        return all(condition in self._reached.get(other, set()) for other, condition in needs)

    def _note_ready(self, waiting: set[str], deadline: float) -> None:
        if any(self._may_start(name) for name in waiting):
            return
        completed, _ = wait(self._watched, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        for future in completed:
            name = self._watched.pop(future)
            self._reached[name].add(future.result())
        if time.monotonic() > deadline + 1.0 and not completed:  # each wait raises this itself, unless its engine hangs
            raise ServiceUnhealthy(f"{', '.join(sorted(self._watched.values()))}: not ready in time.")
        if waiting and not self._watched and not any(self._may_start(name) for name in waiting):
            raise ServiceUnhealthy(self._stuck(waiting))

    def _stuck(self, waiting: set[str]) -> str:
        lines = []
        for name in sorted(waiting):
            for other, condition in self._project.waits_for(name).items():
                reached = self._reached.get(other)
                if reached is not None and condition not in reached:
                    lines.append(f"service {name!r} waits for {other!r} to be {condition}, which it will not be")
        return "; ".join(lines) or f"{', '.join(sorted(waiting))} cannot be started"


class MainContainerProvider(DockerProvider):
    """Creates the main container of one project."""

    def __init__(
        self,
        settings: Settings,
        images: Images,
        semaphore: Semaphore,
        resources: ComposeResources,
        watch: DiskWatch,
        tools: Find | None,
        environment: Callable[..., ComposeEnvironment],
    ) -> None:
        """environment: makes one with the arguments of a `DockerEnvironment`."""
        super().__init__(settings, fetch_bundle=lambda bundle: b"", semaphore=semaphore, tools=tools)
        self._images = images  # it knows the project's build contexts
        self._watch = watch
        self._resources = resources
        self._service = resources.plan.main
        self._environment = environment

    def _network(self, spec: EnvironmentSpec, tags: Tags) -> str:
        return self._resources.network_of(self._service)

    def _user(self, engine: Engine, image_id: str) -> str | None:
        return self._service.user or super()._user(engine, image_id)

    def _labels(self, tags: Tags) -> dict[str, str]:
        return self._resources.labels(self._service.name)

    def _variables(self, spec: EnvironmentSpec) -> dict[str, str]:
        return variables(spec, self._resources.near(self._service))

    def _joining(self) -> dict[str, Any]:
        return {"hostname": self._service.hostname, **self._resources.first_network(self._service)}

    def _create(
        self,
        request: EnvironmentRequest,
        image_id: str,
        network: str | None,
        transport: Transport,
        tools: tuple[Tool, ...],
    ) -> str:
        container_id = super()._create(request, image_id, network, transport, tools)
        self._resources.join_others(self._service, container_id)
        return container_id

    def _limits(self, spec: EnvironmentSpec, network: str | None, mounts: list[Mount]) -> Any:
        return self._resources.host_config_of(super()._limits(spec, network, mounts), self._service)


def start_inside(environment: DockerEnvironment, resources: ComposeResources, image_id: str, deadline: float) -> None:
    """Copies files, starts its own command, waits for its health. Raises: ServiceUnhealthy, EnvironmentFailed."""
    service = resources.plan.main
    for one in resources.plan.copies[service.name]:  # not by the engine: the session's mount has no source any more
        if one.file is not None:
            environment.put(one.target, one.file, mode=one.mode)
        else:
            environment.put_tree(one.tree, one.target)
    with resources.engine.named("look at the main service's image", EnvironmentFailed):
        argv = _own_command(service, resources.engine, image_id)
    if argv and not idle(argv):
        _start(environment, service.name, shlex.join(argv), deadline)
    if service.healthcheck is not None and not service.healthcheck.disabled and service.healthcheck.test:
        own = {**service.variables, **resources.spec.env}
        _await_health(environment, service, deadline, exempted(resources.spec, own, resources.near(service)))


def _start(environment: DockerEnvironment, name: str, command: str, deadline: float) -> None:
    result = environment.run(_START.format(command=command), timeout_s=max(1.0, deadline - time.monotonic()))
    if result.ok:
        return
    how = "out of time" if result.timed_out else f"exit code {result.exit_code}"
    output = result.text()
    with suppress(FileNotFoundError, EnvironmentFailed):
        output += environment.get(LOG).decode("utf-8", "replace")
    tail = output[-_TAIL_CHARACTERS:].strip() or "(nothing)"
    raise ServiceUnhealthy(
        f"service {name!r} did not start ({how}): expected a command that can be executed in its image, found"
        f" {command!r}; fix `command` or `entrypoint`.\nIts log ends with: {tail}"
    )


def _own_command(service: Service, engine: Engine, image_id: str) -> list[str]:
    """Returns the command that the file asks for; the image's own command is not run, as in every environment."""
    if service.entrypoint is not None:
        return [*service.entrypoint, *(service.command or ())]
    if service.command is None:
        return []
    config = engine.api.inspect_image(image_id).get("Config") or {}  # type: ignore[no-untyped-call]
    return [*(config.get("Entrypoint") or ()), *service.command]


def _await_health(environment: DockerEnvironment, service: Service, deadline: float, env: Mapping[str, str]) -> None:
    check = service.healthcheck
    assert check is not None
    command = check.test[1] if check.test[0] == "CMD-SHELL" else shlex.join(check.test[1:])
    begun, failures, next_counted = time.monotonic(), 0, check.interval
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        result = environment.run(command, env=env, timeout_s=min(check.timeout, left_s))
        if result.ok:
            return
        since_s = time.monotonic() - begun
        if since_s >= max(check.start_period, next_counted):
            failures, next_counted = failures + 1, since_s + check.interval
        if failures >= check.retries or time.monotonic() >= deadline:
            how = "is unhealthy" if failures >= check.retries else "was not healthy in time"
            output = result.text()[-_TAIL_CHARACTERS:].strip()
            raise ServiceUnhealthy(f"service {service.name!r} {how}: {output or result.exit_code}")
        time.sleep(_PAUSE_S)
