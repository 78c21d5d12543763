"""The main service: a container as every environment's, with a session, but placed among the others of its project."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from app.compose_file.model import Service
from app.compose_file.values import idle
from app.environments.contract import Tags
from app.environments.networks import exempted, variables
from app.environments.runtimes.compose.resources import Ground
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.session.transports import Entrance
from app.environments.tools import Find, Tool
from app.errors import EnvironmentFailed, ServiceUnhealthy
from app.host.disk_watch import DiskWatch
from app.host.engine import Engine
from app.host.slots import Gate
from app.images.task_images import Images
from app.models.spec import EnvironmentSpec
from app.settings import Settings

LOG = "/var/tmp/.service.log"
"""Where the main service's own command writes, when it has one: its first process is the session's."""
_PAUSE_S = 0.2
_TAIL_CHARACTERS = 2000
_MOST_LOOKS = 10_000
"""For a shell that runs a script itself, without a program of its own."""
_FAILED = "/var/tmp/.service.failed"
_NOT_YET = "service-starts"
_START = f"""\
{{{{ echo {_NOT_YET} >/proc/$$/comm; }}}} 2>/dev/null
[ -d /var/tmp ] || mkdir -p /var/tmp
: >{LOG} || exit
{{{{ trap '' HUP; trap 'echo $? >{_FAILED}' EXIT; exec {{command}}; }}}} >{LOG} 2>&1 </dev/null &
looks=0 name= state=
while [ $looks -lt {_MOST_LOOKS} ] && [ -e /proc/$! ]; do
  looks=$((looks + 1)) name= state=
  read -r id name state others </proc/$!/stat
  case "$name $state" in "({_NOT_YET}"*") Z") break ;; "({_NOT_YET}"* | *" ") ;; *) exit 0 ;; esac
done 2>/dev/null
[ "$state" = Z ] || [ ! -e /proc/$! ] || exit 0
wait $!
code=$?
[ "$state" = Z ] || [ -n "$BASH_VERSION" ] || [ -e {_FAILED} ] || exit 0
case $code in 126 | 127) exit $code ;; esac
"""
"""Start a command in the background, and leave with its exit code when there was nothing to execute.

A process has the name that its shell gave itself until it has become the program: whether it ends before or has another
name is known as soon as the kernel knows. A command that starts is waited for no longer, and what the program itself
leaves with, now or later, is its own affair. Of one that was gone before it was looked at, a shell's file tells; bash
leaves none, and there a program that ends at once as if it had not been found counts as not found.
"""


class MainProvider(DockerProvider):
    """Makes the main container of one project."""

    def __init__(
        self,
        settings: Settings,
        images: Images,
        gate: Gate,
        ground: Ground,
        watch: DiskWatch,
        tools: Find | None,
    ) -> None:
        super().__init__(settings, fetch_bundle=lambda bundle: b"", gate=gate, tools=tools)
        self._images = images  # it knows the project's build contexts
        self._watch = watch
        self._ground = ground
        self._service = ground.plan.main

    def _network(self, spec: EnvironmentSpec, tags: Tags) -> str:
        return self._ground.network_of(self._service)

    def _user(self, engine: Engine, image_id: str) -> str | None:
        return self._service.user or super()._user(engine, image_id)

    def _labels(self, tags: Tags) -> dict[str, str]:
        return self._ground.labels(self._service.name)

    def _variables(self, spec: EnvironmentSpec) -> dict[str, str]:
        return variables(spec, self._ground.near(self._service))

    def _joining(self) -> dict[str, Any]:
        return {"hostname": self._service.hostname, **self._ground.joining(self._service)}

    def _create(
        self,
        engine: Engine,
        spec: EnvironmentSpec,
        tags: Tags,
        image_id: str,
        network: str | None,
        entrance: Entrance,
        tools: tuple[Tool, ...],
    ) -> str:
        container_id = super()._create(engine, spec, tags, image_id, network, entrance, tools)
        self._ground.join_others(self._service, container_id)
        return container_id

    def _limits(
        self, engine: Engine, spec: EnvironmentSpec, network: str | None, entrance: Entrance, tools: tuple[Tool, ...]
    ) -> Any:
        return self._ground.amended(super()._limits(engine, spec, network, entrance, tools), self._service)


def start_inside(environment: DockerEnvironment, ground: Ground, image_id: str, deadline: float) -> None:
    """Copy files in, start the service's own command if it has one, and wait until it is healthy.

    Raises: ServiceUnhealthy, EnvironmentFailed, EngineUnavailable.
    """
    service = ground.plan.main
    for one in ground.plan.copies[service.name]:  # not by the engine: its session's mount has gone from our side
        if one.file is not None:
            environment.put(one.target, one.file, mode=one.mode)
        else:
            environment.put_tree(one.tree, one.target)
    with ground.engine.named("look at the main service's image", EnvironmentFailed):
        argv = _own_command(service, ground.engine, image_id)
    if argv and not idle(argv):
        _start(environment, service.name, shlex.join(argv), deadline)
    if service.healthcheck is not None and not service.healthcheck.disabled and service.healthcheck.test:
        own = {**service.variables, **ground.spec.env}
        _await_health(environment, service, deadline, exempted(ground.spec, own, ground.near(service)))


def _start(environment: DockerEnvironment, name: str, command: str, deadline: float) -> None:
    result = environment.run(_START.format(command=command), timeout_s=max(1.0, deadline - time.monotonic()))
    if result.ok:
        return
    how = "out of time" if result.timed_out else f"exit code {result.exit_code}"
    said = result.text()
    with suppress(FileNotFoundError, EnvironmentFailed):
        said += environment.get(LOG).decode("utf-8", "replace")
    tail = said[-_TAIL_CHARACTERS:].strip() or "(nothing)"
    raise ServiceUnhealthy(
        f"service {name!r} did not start ({how}): expected a command that can be executed in its image, found"
        f" {command!r}; mend `command` or `entrypoint`.\nIts log ends with: {tail}"
    )


def _own_command(service: Service, engine: Engine, image_id: str) -> list[str]:
    """What the file wants to run; the image's own command is not run, as in every environment."""
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
            said = result.text()[-_TAIL_CHARACTERS:].strip()
            raise ServiceUnhealthy(f"service {service.name!r} {how}: {said or result.exit_code}")
        time.sleep(_PAUSE_S)
