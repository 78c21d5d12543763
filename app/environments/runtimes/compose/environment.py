"""Several containers as one environment: the agent acts in the main one, whoever grades may look at all."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog

from app.environments.contract import (
    CommandResult,
    CreatedResources,
    Environment,
    Forward,
    ResetProof,
    Serve,
    ServiceMemory,
    Snapshot,
    Stats,
    Tags,
)
from app.environments.runtimes.compose.disk_usage import Footprint
from app.environments.runtimes.compose.main_container import LOG
from app.environments.runtimes.compose.project_cgroup import BOUNDED_APART
from app.environments.runtimes.compose.resources import Ground
from app.environments.runtimes.compose.service import Peer
from app.environments.runtimes.compose.start_order import logs_of
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.session.protocol import KEEP_BYTES
from app.errors import EnvironmentFailed, StationError
from app.models.shell import InteractiveProgram, OutputLogs, Shell, StatefulShell

log = structlog.get_logger()

NO_SNAPSHOTS = (
    "expected one container to keep a snapshot of or to make of one, found several: what the other services and their"
    " volumes hold is in the files of none of them."
)
_LOG_BYTES = 2 * KEEP_BYTES
"""A command's output holds no more."""
_LOG_S = 20.0


class ComposeEnvironment(Environment):
    """A whole project. Safe to share between threads.

    start_again: starts the other services, and what the main one runs of its own, by a deadline (monotonic).
    start_s: how long that may take.
    """

    def __init__(
        self,
        main: DockerEnvironment,
        peers: dict[str, Peer],
        ground: Ground,
        footprint: Footprint,
        start_again: Callable[[float], None],
        start_s: float,
    ) -> None:
        self._main = main
        self._peers = peers
        self._ground = ground
        self._footprint = footprint
        self._start_again = start_again
        self._start_s = start_s
        self._gone = threading.Event()
        self._resetting = threading.Lock()
        self._known: list[dict[str, Any]] = []
        self._main_killed = False  # for its memory limit, as far as known

    @property
    def id(self) -> str:
        """The main container's."""
        return self._main.id

    def keep_logs(self, logs: OutputLogs | None) -> bool:
        for peer in self._peers.values():
            peer.keep_logs(logs)
        return self._main.keep_logs(logs)

    def memory_kills(self) -> int | None:
        """Of the main service."""
        return self._main.memory_kills()

    def memory_beside(self) -> dict[str, ServiceMemory]:
        return {name: peer.memory for name, peer in self._peers.items()}

    def processes_refused(self) -> int | None:
        """Of the main service."""
        return self._main.processes_refused()

    # --- Its services -----------------------------------------------------------------------------------------------

    @property
    def services(self) -> tuple[str, ...]:
        return tuple(self._ground.plan.project.services)

    def service(self, name: str) -> Shell:
        if name == self._ground.plan.project.main:
            return self._main
        self._ground.raise_if_ended()
        if name not in self._peers:
            raise EnvironmentFailed(f"no service {name!r} in this environment; known: {', '.join(self.services)}")
        return self._peers[name].session

    def logs(self) -> dict[str, bytes]:
        found = logs_of(self._peers)
        with suppress(StationError):
            # By a command, whose output is bounded: the file is the agent's, and may be anything by now.
            told = self._main.run(f"[ ! -f {LOG} ] || tail -c {_LOG_BYTES} {LOG}", cwd="/", timeout_s=_LOG_S)
            if told.stdout:
                found[self._ground.plan.project.main] = told.stdout
        return found

    def assure(self) -> None:
        """The engine answers for the names of services and has their logs; one that was started again ends containers.

        Raises: EngineUnavailable, EnvironmentFailed.
        """
        self._ground.raise_if_ended()
        engine = self._ground.engine
        with engine.named("look whether the services stand", EnvironmentFailed):
            running = engine.api.inspect_container(self.id)["State"]["Running"]
        if not running:
            raise EnvironmentFailed(f"expected the main service of project {self._ground.id} running, found it ended.")

    def created_resources(self) -> CreatedResources:
        found = self._ground.created()
        volumes = (*found.volumes, *self._ground.anonymous_volumes(found.containers))
        return dataclasses.replace(found, volumes=volumes)

    def describe(self) -> dict[str, Any]:
        project = self._ground.plan.project
        main = self._main.describe()
        if not self._gone.is_set():
            self._look()
        image = self._ground.plan.images[project.main].label
        own: dict[str, Any] = {
            "name": project.main,
            "id": self.id,
            "image": image,
            "state": "running",
            "exit_code": None,
        }
        own |= {"health": None, "out_of_memory": self._main_killed}
        removed = {"state": "removed"} if self._gone.is_set() else {}
        return {
            **main,
            "kind": "compose",
            "image": self._ground.spec.label,
            "services": [{**one, **removed} for one in (own, *self._known)],
            "notes": [*project.notes, *([] if self._ground.cgroup else [BOUNDED_APART])],
        }

    def _look(self) -> None:
        """What was known before will do where nobody says more."""
        self._main_killed = self._main_killed or bool(self._main.memory_kills())
        with suppress(StationError):
            self._known = [peer.describe() for peer in self._peers.values()]

    def adopt(self, tags: Tags) -> None:
        """From now on it belongs to this attempt: the containers' names say so. Raises: EnvironmentFailed."""
        engine = self._ground.engine
        with self._main.times.handed_on(), engine.named("take over the services", EnvironmentFailed):
            self._main.adopt(tags)
            for peer in self._peers.values():
                engine.api.rename(peer.id, tags.name())
        self._ground.tags = tags

    # --- The main service -------------------------------------------------------------------------------------------

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        return self._main.run(command, cwd=cwd, env=env, timeout_s=timeout_s, stdin=stdin)

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        return self._main.shell(cwd=cwd, env=env)

    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> InteractiveProgram:
        return self._main.stream(argv, cwd=cwd, env=env, tty=tty, rows=rows, columns=columns)

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._main.put(path, content, mode=mode)

    def get(self, path: str) -> bytes:
        return self._main.get(path)

    def put_tree(self, archive: bytes, path: str) -> None:
        self._main.put_tree(archive, path)

    def get_tree(self, path: str) -> bytes:
        return self._main.get_tree(path)

    def stats(self) -> Stats:
        """Of the main service."""
        return self._main.stats()

    def forward(self, port: int, serve: Serve) -> Forward:
        """At the main service's own loopback."""
        return self._main.forward(port, serve)

    # --- Life -------------------------------------------------------------------------------------------------------

    def snapshot(self, tags: Tags) -> Snapshot:
        """Raises: EnvironmentFailed: always; the main service's files alone would be half of what was there."""
        raise EnvironmentFailed(NO_SNAPSHOTS)

    def _reset(self) -> ResetProof:
        """The main container as every container; the others are made anew, their volumes with them."""
        if self._ground.spec.setup:
            return ResetProof(clean=False, left=("set-up commands ran: what they made is in no image",))
        with self._resetting:
            try:
                self._ground.bound()  # for a moment nobody may be in the group: not to be taken for abandoned
                proof = self._main.reset()
                self._main_killed = False
                if proof.clean:
                    self._renew()
                self._ground.raise_if_ended()
            except StationError as error:
                log.warning("environment.reset_failed", environment=self.id, reason=str(error))
                proof = ResetProof(clean=False, left=(f"the services could not be made anew: {error}",))
            if not self._gone.is_set():
                return proof
            with suppress(StationError):  # what was made since it was ended must not stay; else it is swept
                self._ground.remove()
            return ResetProof(clean=False, left=("it was ended meanwhile",))

    def _renew(self) -> None:
        begun = time.monotonic()
        for peer in self._peers.values():
            peer.close()
        self._ground.remove_containers(but=self.id)
        self._ground.empty_volumes()
        self._start_again(time.monotonic() + self._start_s)
        phases = self._main.times.phases
        phases["reset"] = phases.get("reset", 0.0) + time.monotonic() - begun

    def _destroy(self) -> None:
        first = not self._gone.is_set()
        begun = time.monotonic()
        if first:
            self._look()
        self._gone.set()
        self._footprint.end()
        for peer in self._peers.values():
            peer.close()
        try:
            with suppress(StationError):  # the proof is that nothing of the project is left
                self._main.destroy()
        finally:
            self._ground.remove()
            if first:
                self._main.times.phases["teardown"] = time.monotonic() - begun
                log.info("environment.project_removed", environment=self.id, project=self._ground.id)
