"""Defines the interface of an environment and of its provider.

The creator of one owns it and ends it with `destroy`; a sweeper reaps by label what its owner could not.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID, uuid4

from app.errors import EnvironmentFailed
from app.host.cgroup_counts import GroupUsage
from app.models.shell import CommandResult, DecideFile, OutputLogs, Restart, Shell
from app.models.spec import EnvironmentSpec


class Origin(StrEnum):
    """Where an environment came from."""

    FRESH = "fresh"  # made for this attempt
    RECYCLED = "recycled"  # used by an earlier task, reset, proven clean


class Route(StrEnum):
    """By which way an environment came to its attempt: what its phase times are to be compared with."""

    COLD = "cold"  # made while the attempt waited
    RECYCLED = "recycled"  # used by another task, reset, proven clean
    SNAPSHOT = "snapshot"  # made from files that a set-up left
    SHARED = "shared"  # read-only, and another attempt of the run has it, too


@dataclass
class Times:
    """What one environment cost its attempt, in seconds by phase; no second counts in two of them.

    Phases: `image`, `create`, `start`, `session` (until the first answer), `set_up`; `hand_out` of one that was there
    before it was asked for; `reset`, with the start that belongs to it, and `teardown` at the end.
    """

    route: Route = Route.COLD
    phases: dict[str, float] = field(default_factory=dict)
    _inner_s: float = field(default=0.0, repr=False, compare=False)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """The block's time without what is measured inside it; a phase that comes twice is added up."""
        with ExitStack() as measured:
            if (noted := _noted.get()) is not None and noted is not self:
                measured.enter_context(noted._measured(phase))
            measured.enter_context(self._measured(phase))
            yield

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        begun, outer_s, self._inner_s = time.monotonic(), self._inner_s, 0.0
        try:
            yield
        finally:
            took_s = time.monotonic() - begun
            self.phases[phase] = self.phases.get(phase, 0.0) + took_s - self._inner_s
            self._inner_s = outer_s + took_s

    @contextmanager
    def handed_on(self) -> Iterator[None]:
        """The block gives it to its next attempt, which pays for that alone when it was reset for it before."""
        begun, was_reset = time.monotonic(), "reset" in self.phases
        yield
        if was_reset:
            self.phases = {"hand_out": time.monotonic() - begun}

    def describe(self) -> dict[str, Any]:
        """`path` and `phases`, as an attempt records them: to a tenth of a millisecond."""
        return {"path": self.route.value, "phases": {name: round(took_s, 4) for name, took_s in self.phases.items()}}


_noted: ContextVar[Times | None] = ContextVar("noted_times", default=None)


@contextmanager
def noting() -> Iterator[Times]:
    """All that this thread measures inside the block, of whichever environment: of one that never comes, too."""
    noted = Times()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


@dataclass(frozen=True, slots=True)
class Stats:
    """What an environment uses now, as seen from inside; None where the kernel does not show it."""

    processes: int  # but for the helper's own
    memory_bytes: int | None
    memory_peak_bytes: int | None
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class Tags:
    """Who an environment belongs to, as labels of its objects; a trial has no attempt and lives by its deadline."""

    installation: str
    instance_id: UUID
    run_id: UUID | None
    task_id: UUID | None
    attempt_id: UUID | None
    deadline_unix_s: float

    @classmethod
    def without_attempt(cls, installation: str, owner_id: UUID, deadline_unix_s: float) -> Tags:
        """Of an environment that belongs to no attempt."""
        return cls(installation, owner_id, None, None, None, deadline_unix_s)

    def labels(self) -> dict[str, str]:
        """`megaflow` and its finer ones, as Docker labels."""
        parts = {"run": self.run_id, "task": self.task_id, "attempt": self.attempt_id}
        return {
            "megaflow": self.installation,
            "megaflow.instance": str(self.instance_id),
            **{f"megaflow.{part}": str(found) for part, found in parts.items() if found is not None},
            "megaflow.deadline": f"{self.deadline_unix_s:.0f}",
        }

    def name(self) -> str:
        """`megaflow-ATTEMPT-RANDOM-DEADLINE` (`trial` without attempt), another each time; the sweeper reads it."""
        return f"megaflow-{self.attempt_id or 'trial'}-{uuid4().hex[:6]}-{self.deadline_unix_s:.0f}"


UNSEEN = "the engine's layers are not visible here: nothing can be proven"
"""What a reset says is left where the container's layer cannot be read."""


@dataclass(frozen=True, slots=True)
class ResetProof:
    """What a reset found and did. `clean` is False when something could not be restored: then replace it."""

    clean: bool
    removed: int = 0
    restored: int = 0
    killed: int = 0
    left: tuple[str, ...] = field(default=())  # what could not be restored
    took_s: float = field(default=0.0, compare=False)  # the comparison included; by whoever asked for it


Serve = Callable[[socket.socket], None]
"""What is done with a connection: it is connected, blocking, and ours to close. Called in a thread of its own."""


class Forward(Protocol):
    """A port inside that leads to us. The caller closes it; it ends with the environment in any case."""

    @property
    def port(self) -> int: ...

    def close(self) -> None:
        """Take no more connections and end those there are. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceMemory:
    """The memory limit of one service, and how many processes the kernel killed for it since it was started."""

    limit_bytes: int
    kills: int
    host_kills: int = 0  # because its host was short of memory


@dataclass(frozen=True, slots=True)
class CreatedResources:
    """Ids of what an environment consists of on a container engine."""

    containers: tuple[str, ...]
    networks: tuple[str, ...]
    volumes: tuple[str, ...]

    @property
    def none(self) -> bool:
        return not (self.containers or self.networks or self.volumes)


class EnvironmentReceipt(Protocol):
    """Records the resets and the end of one environment."""

    def was_reset(self) -> None:
        """Its other services are new ones. Never raises."""
        ...

    def was_destroyed(self) -> None:
        """Safe to call twice. Never raises."""
        ...


class Environment(Shell, Protocol):
    """One live environment. Drivers inherit; what only some can do has a default here that says so."""

    receipt: EnvironmentReceipt | None = None

    @property
    def id(self) -> str:
        """The provider's own identifier, e.g. the container's."""
        ...

    def describe(self) -> dict[str, Any]:
        """What an attempt records about it: kind, id, image, origin and `Times.describe`; also after its end."""
        ...

    def adopt(self, tags: Tags) -> None:
        """Show outside to which attempt it belongs from now on, where it can. Raises: EnvironmentFailed."""
        return

    def stats(self) -> Stats:
        """What it uses now. Raises: EnvironmentFailed."""
        ...

    def memory_kills(self) -> int | None:
        """Processes killed for its memory limit since creation or reset; None: not counted here. Never raises."""
        return None

    def host_kills(self) -> int | None:
        """Processes killed since then, in any of its containers, because its host was short of memory. Never raises."""
        return None

    def throttled_s(self) -> float | None:
        """Seconds since then in which its limit of processors held it up; None: not counted here. Never raises."""
        return None

    def usage(self) -> GroupUsage | None:
        """Memory and processor time by its control group; None: this host does not show it. Never raises."""
        return None

    def memory_beside(self) -> dict[str, ServiceMemory]:
        """Memory limits and kills of its other services, by name; the last known of an ended one. Never raises."""
        return {}

    def processes_refused(self) -> int | None:
        """Processes refused for its limit since creation or reset; None: not counted here. Never raises."""
        return None

    def keep_logs(self, logs: OutputLogs | None) -> bool:
        """Keep long outputs of commands whole, there; None: nowhere. False: it cannot."""
        return False

    def forward(self, port: int, serve: Serve) -> Forward:
        """Have connections to `port` of its own loopback (127.0.0.1) come to `serve`. A reset ends it.

        port: 0 for one that is free. Raises: EnvironmentFailed: not possible here, or the port is taken.
        """
        ...

    @property
    def services(self) -> tuple[str, ...]:
        """Names of all services, the main one too."""
        return ()

    def service(self, name: str) -> Shell:
        """Commands and files in one of the services. Raises: EnvironmentFailed: no such service."""
        raise EnvironmentFailed(f"environment {self.id[:12]} has no services: it is one container.")

    def run_in(self, service: str, command: str, *, timeout_s: float) -> CommandResult:
        """One command in any of the services. Raises: EnvironmentFailed."""
        return self.service(service).run(command, timeout_s=timeout_s)

    def logs(self) -> dict[str, bytes]:
        """What each service has written, while it runs; of much the end (2 MB or 4). Never raises."""
        return {}

    def assure(self) -> None:
        """Check that the services' names and logs are reachable. Raises: EnvironmentFailed, EngineUnavailable."""
        return

    def created_resources(self) -> CreatedResources | None:
        """What it consists of on the engine; None: one container. Raises: EnvironmentFailed, EngineUnavailable."""
        return None

    def restart(self, decide: DecideFile) -> Restart:
        """End every process in it, put back what `decide` names of the image's files, and start it again.

        What else the task wrote stays; what lies in memory (/dev/shm) goes. Other services run on. Here: a kind that
        has no image and no first process of its own, so that nothing is done.

        Raises: EnvironmentFailed, EngineUnavailable.
        """
        return Restart(killed=0)

    def reset(self) -> ResetProof:
        """Bring it back to how it was after creation: files, processes. Does not raise for what it cannot fix."""
        proof = self._reset()
        if self.receipt is not None:
            self.receipt.was_reset()
        return proof

    def destroy(self) -> None:
        """End it now, with everything in it. Safe to call twice, and from another thread to abort a command.

        Raises: EnvironmentFailed, EngineUnavailable: something of it stands yet. No one can use it all the same, and
        the sweeper removes it.
        """
        self._destroy()
        if self.receipt is not None:
            self.receipt.was_destroyed()

    def _reset(self) -> ResetProof: ...

    def _destroy(self) -> None: ...


class EnvironmentProvider(Protocol):
    """Makes environments of one kind."""

    def kind_of(self, spec: EnvironmentSpec) -> str:
        """The kind that `describe` of this spec's environment would name."""
        return spec.kind.value

    def tool_versions(self, spec: EnvironmentSpec) -> Mapping[str, str]:
        """Versions of the spec's tools by name, where they are mounted at a fixed place. Raises: AgentUnavailable."""
        return {}

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Have the image here: found, built or pulled, once however many ask. Returns its identity.

        Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        ...

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> Environment:
        """A fresh environment with the spec's limits, its set-up commands done.

        Raises: EnvironmentFailed, ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        ...
