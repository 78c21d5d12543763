"""Several containers as one environment: the agent acts in the main one, a grader may read all."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from app.environments.contract import CreatedResources, ResetProof, ServiceMemory, Tags
from app.environments.runtimes.compose.resources import BOUNDED_APART, ComposeResources
from app.environments.runtimes.compose.service import ProjectDisk, ServiceContainer, ServiceState
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.session.protocol import KEEP_BYTES
from app.errors import EnvironmentFailed, StationError
from app.models.shell import DecideFile, OutputLogs, Restart, Shell

log = structlog.get_logger()

LOG = "/var/tmp/.service.log"
"""Log file of the main service's own command, if it has one: its first process is the session's."""
_LOG_BYTES = 2 * KEEP_BYTES
"""Maximum bytes of a log: a command's output holds no more."""
_LOG_S = 20.0


class ComposeEnvironment(DockerEnvironment):
    """The main container, with all other services. Safe to share between threads.

    What is not said of others (commands, files, ports, use of resources) is the main container's.
    """

    def __init__(
        self,
        resources: ComposeResources,
        others: dict[str, ServiceContainer],
        disk: ProjectDisk,
        start_again: Callable[[float], None],
        start_s: float,
        *container: Any,
        **more: Any,
    ) -> None:
        """start_again: starts the other services, and what the main one runs of its own, by a deadline (monotonic).
        start_s: how long that may take. container, more: as for `DockerEnvironment`.
        """
        super().__init__(*container, **more)
        self._resources = resources
        self._others = others
        self._disk = disk
        self._start_again = start_again
        self._start_s = start_s
        self._resetting = threading.Lock()
        self._last_states: list[ServiceState] = []
        self._main_out_of_memory = False  # for its memory limit, as far as known

    def keep_logs(self, logs: OutputLogs | None) -> bool:
        for other in self._others.values():
            other.keep_logs(logs)
        return super().keep_logs(logs)

    def memory_beside(self) -> dict[str, ServiceMemory]:
        return {name: other.memory for name, other in self._others.items()}

    def host_kills(self) -> int | None:
        counts = [super().host_kills(), *(one.host_kills for one in self.memory_beside().values())]
        return sum(known) if (known := [one for one in counts if one is not None]) else None

    @property
    def services(self) -> tuple[str, ...]:
        return tuple(self._resources.plan.project.services)

    def service(self, name: str) -> Shell:
        if name == self._resources.plan.project.main:
            return self
        self._resources.raise_if_ended()
        if name not in self._others:
            raise EnvironmentFailed(f"no service {name!r} in this environment; known: {', '.join(self.services)}")
        return self._others[name].session

    def logs(self) -> dict[str, bytes]:
        outputs = {}
        for name, other in self._others.items():
            with suppress(StationError):
                outputs[name] = other.log()
        with suppress(StationError):
            # Read by a command, whose output is limited: the file is the agent's, and may be anything by now.
            result = self.run(f"[ ! -f {LOG} ] || tail -c {_LOG_BYTES} {LOG}", cwd="/", timeout_s=_LOG_S)
            if result.stdout:
                outputs[self._resources.plan.project.main] = result.stdout
        return outputs

    def assure(self) -> None:
        """Checks that the main service runs, and the engine answers. Raises: EngineUnavailable, EnvironmentFailed."""
        self._resources.raise_if_ended()
        engine = self._resources.engine
        with engine.named("look whether the services stand", EnvironmentFailed):
            running = engine.api.inspect_container(self.id)["State"]["Running"]
        if not running:
            raise EnvironmentFailed(
                f"expected the main service of project {self._resources.id} running, found it ended."
            )

    def created_resources(self) -> CreatedResources:
        created = self._resources.created()
        volumes = (*created.volumes, *self._resources.anonymous_volumes(created.containers))
        return dataclasses.replace(created, volumes=volumes)

    def describe(self) -> dict[str, Any]:
        project = self._resources.plan.project
        main = super().describe()
        if not self._gone.is_set():
            self._note_states()
        image = self._resources.plan.images[project.main].label
        own = ServiceState(project.main, self.id, image, "running", out_of_memory=self._main_out_of_memory)
        removed = {"state": "removed"} if self._gone.is_set() else {}
        return {
            **main,
            "kind": "compose",
            "image": self._resources.spec.label,
            "services": [{**dataclasses.asdict(one), **removed} for one in (own, *self._last_states)],
            "notes": [*project.notes, *([] if self._resources.cgroup else [BOUNDED_APART])],
        }

    def _note_states(self) -> None:
        self._main_out_of_memory = self._main_out_of_memory or bool(self.memory_kills())
        with suppress(StationError):
            self._last_states = [other.state() for other in self._others.values()]

    def adopt(self, tags: Tags) -> None:
        """Records in the containers' names that it belongs to this attempt from now on. Raises: EnvironmentFailed."""
        engine = self._resources.engine
        with self.times.handed_on(), engine.named("take over the services", EnvironmentFailed):
            super().adopt(tags)
            for other in self._others.values():
                engine.api.rename(other.id, tags.name())
        self._resources.tags = tags

    def restart(self, decide: DecideFile) -> Restart:
        """Restarts the main service: no agent was in the others."""
        with self._resetting:
            self._note_states()
            return super().restart(decide)

    def _reset(self) -> ResetProof:
        """Resets the main container as any other; makes the other containers and the volumes anew."""
        if self._resources.spec.setup:
            return ResetProof(clean=False, left=("set-up commands ran: what they made is in no image",))
        with self._resetting:
            try:
                self._resources.create_cgroup()  # it may be empty for a moment, and must not be swept
                proof = super()._reset()
                self._main_out_of_memory = False
                if proof.clean:
                    self._renew()
                self._resources.raise_if_ended()
            except StationError as error:
                log.warning("environment.reset_failed", environment=self.id, reason=str(error))
                proof = ResetProof(clean=False, left=(f"the services could not be made anew: {error}",))
            if not self._gone.is_set():
                return proof
            with suppress(StationError):  # what was made after its end must not stay; else the sweeper removes it
                self._resources.remove()
            return ResetProof(clean=False, left=("it was ended meanwhile",))

    def _renew(self) -> None:
        begun = time.monotonic()
        for other in self._others.values():
            other.close()
        self._resources.remove_containers(but=self.id)
        self._resources.renew_volumes()
        self._start_again(time.monotonic() + self._start_s)
        phases = self.times.phases
        phases["reset"] = phases.get("reset", 0.0) + time.monotonic() - begun

    def _destroy(self) -> None:
        first, begun = not self._gone.is_set(), time.monotonic()
        if first:
            self._note_states()
        self._gone.set()
        self._disk.end()
        for other in self._others.values():
            other.close()
        try:
            with suppress(StationError):  # `remove` below proves that nothing of the project is left
                super()._destroy()
        finally:
            self._resources.remove()
            if first:
                self.times.phases["teardown"] = time.monotonic() - begun
                log.info("environment.project_removed", environment=self.id, project=self._resources.id)
