"""Defines the interface of an environment and of its provider.

The creator of an environment owns it and ends it with `destroy`. A sweeper removes by label what its owner did not end.
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
    """Origin of an environment: fresh or recycled."""

    FRESH = "fresh"  # made for this attempt
    RECYCLED = "recycled"  # used by an earlier task, reset, proven clean


class Route(StrEnum):
    """Way in which an attempt got its environment. Compare phase times only within one route."""

    COLD = "cold"  # made while the attempt waited
    RECYCLED = "recycled"  # used by another task, reset, proven clean
    SNAPSHOT = "snapshot"  # made from files that a set-up left
    SHARED = "shared"  # read-only, and shared with another attempt of the run


@dataclass
class Times:
    """Time that one environment cost its attempt, in seconds by phase. No second counts in two phases.

    Phases: `image`, `create`, `start`, `session` (until the first reply), `set_up`; `hand_out` for an environment that
    existed before the request; `reset`, including the start that follows it, and `teardown` at the end.
    """

    route: Route = Route.COLD
    phases: dict[str, float] = field(default_factory=dict)
    _inner_s: float = field(default=0.0, repr=False, compare=False)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measures the block's time, without phases measured inside it. Times of a repeated phase are added."""
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
        """Measures the block, which hands it to the next attempt. After a reset, it pays only for this block."""
        begun, was_reset = time.monotonic(), "reset" in self.phases
        yield
        if was_reset:
            self.phases = {"hand_out": time.monotonic() - begun}

    def describe(self) -> dict[str, Any]:
        """Returns `path` and `phases`, as an attempt records them, rounded to a tenth of a millisecond."""
        return {"path": self.route.value, "phases": {name: round(took_s, 4) for name, took_s in self.phases.items()}}


_noted: ContextVar[Times | None] = ContextVar("noted_times", default=None)


@contextmanager
def noting() -> Iterator[Times]:
    """Collects all that this thread measures in the block, for any environment, also one that fails to start."""
    noted = Times()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


@dataclass(frozen=True, slots=True)
class Stats:
    """Current resource use of an environment, seen from inside. None: the kernel does not show it."""

    processes: int  # without the helper's own
    memory_bytes: int | None
    memory_peak_bytes: int | None
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class Tags:
    """Owner of an environment, as labels of its objects. A trial has no attempt and is removed by its deadline."""

    installation: str
    instance_id: UUID
    run_id: UUID | None
    task_id: UUID | None
    attempt_id: UUID | None
    deadline_unix_s: float

    @classmethod
    def without_attempt(cls, installation: str, owner_id: UUID, deadline_unix_s: float) -> Tags:
        """Returns the tags of an environment that belongs to no attempt."""
        return cls(installation, owner_id, None, None, None, deadline_unix_s)

    def labels(self) -> dict[str, str]:
        """Returns `megaflow` and the more specific labels, as Docker labels."""
        parts = {"run": self.run_id, "task": self.task_id, "attempt": self.attempt_id}
        return {
            "megaflow": self.installation,
            "megaflow.instance": str(self.instance_id),
            **{f"megaflow.{part}": str(value) for part, value in parts.items() if value is not None},
            "megaflow.deadline": f"{self.deadline_unix_s:.0f}",
        }

    def name(self) -> str:
        """Returns `megaflow-ATTEMPT-RANDOM-DEADLINE` (`trial` without attempt), new each time. The sweeper reads it."""
        return f"megaflow-{self.attempt_id or 'trial'}-{uuid4().hex[:6]}-{self.deadline_unix_s:.0f}"


UNSEEN = "the engine's layers are not visible here: nothing can be proven"
"""Reason in `ResetProof.left` where the container's layer cannot be read."""


@dataclass(frozen=True, slots=True)
class ResetProof:
    """Result of a reset. `clean` is False when something could not be restored: replace the environment then."""

    clean: bool
    removed: int = 0
    restored: int = 0
    killed: int = 0
    left: tuple[str, ...] = field(default=())  # what could not be restored
    took_s: float = field(default=0.0, compare=False)  # including the comparison; set by the caller of the reset


Serve = Callable[[socket.socket], None]
"""Handler of one connection, in its own thread. The socket is connected and blocking. The forward closes it."""


class Forward(Protocol):
    """A port inside that leads to this process. The caller closes it. The end of the environment also ends it."""

    @property
    def port(self) -> int: ...

    def close(self) -> None:
        """Stops accepting connections and ends the existing ones. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceMemory:
    """Memory limit of one service, and how many processes the kernel killed for it since its start."""

    limit_bytes: int
    kills: int
    host_kills: int = 0  # because its host was short of memory


@dataclass(frozen=True, slots=True)
class CreatedResources:
    """Ids of the objects of one environment on a container engine."""

    containers: tuple[str, ...]
    networks: tuple[str, ...]
    volumes: tuple[str, ...]

    @property
    def none(self) -> bool:
        return not (self.containers or self.networks or self.volumes)


class EnvironmentReceipt(Protocol):
    """Records the resets and the end of one environment."""

    def was_reset(self) -> None:
        """Records a reset, which made new containers for the other services. Never raises."""
        ...

    def was_destroyed(self) -> None:
        """Records the end. Safe to call twice. Never raises."""
        ...


class Environment(Shell, Protocol):
    """A live environment. Drivers inherit from it. A method that only some drivers support has a default here."""

    receipt: EnvironmentReceipt | None = None

    @property
    def id(self) -> str:
        """The provider's own identifier, for example the container id."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns what an attempt records: kind, id, image, origin and `Times.describe`. Also works after its end."""
        ...

    def adopt(self, tags: Tags) -> None:
        """Shows outside, where possible, to which attempt it belongs from now on. Raises: EnvironmentFailed."""
        return

    def stats(self) -> Stats:
        """Returns its current resource use. Raises: EnvironmentFailed."""
        ...

    def memory_kills(self) -> int | None:
        """Counts processes killed by its memory limit since creation or reset; None: not counted here. Never raises."""
        return None

    def host_kills(self) -> int | None:
        """Counts processes of all its containers killed since then because its host lacked memory. Never raises."""
        return None

    def throttled_s(self) -> float | None:
        """Returns the seconds since then in which its CPU limit held it up; None: not counted here. Never raises."""
        return None

    def usage(self) -> GroupUsage | None:
        """Returns memory and processor time of its control group; None: this host does not show it. Never raises."""
        return None

    def memory_beside(self) -> dict[str, ServiceMemory]:
        """Returns memory limits and kills of other services, by name; of an ended one the last known. Never raises."""
        return {}

    def processes_refused(self) -> int | None:
        """Counts processes refused by its limit since creation or reset; None: not counted here. Never raises."""
        return None

    def keep_logs(self, logs: OutputLogs | None) -> bool:
        """Stores long command outputs in full in `logs`; None: nowhere. Returns False when it cannot."""
        return False

    def forward(self, port: int, serve: Serve) -> Forward:
        """Forwards connections to `port` of its own loopback (127.0.0.1) to `serve`. A reset ends the forward.

        port: 0 for any free port. Raises: EnvironmentFailed: not possible here, or the port is taken.
        """
        ...

    @property
    def services(self) -> tuple[str, ...]:
        """Names of all services, including the main one."""
        return ()

    def service(self, name: str) -> Shell:
        """Returns a shell in one of the services. Raises: EnvironmentFailed: no such service."""
        raise EnvironmentFailed(f"environment {self.id[:12]} has no services: it is one container.")

    def run_in(self, service: str, command: str, *, timeout_s: float) -> CommandResult:
        """Runs one command in a service. Raises: EnvironmentFailed."""
        return self.service(service).run(command, timeout_s=timeout_s)

    def logs(self) -> dict[str, bytes]:
        """Returns what each service has written, also an ended one; of a long log the end (2 MB or 4). Never raises."""
        return {}

    def assure(self) -> None:
        """Checks that the services' names and logs are reachable. Raises: EnvironmentFailed, EngineUnavailable."""
        return

    def created_resources(self) -> CreatedResources | None:
        """Returns its objects on the engine; None: one container. Raises: EnvironmentFailed, EngineUnavailable."""
        return None

    def restart(self, decide: DecideFile) -> Restart:
        """Ends every process in it, restores the files of the image that `decide` names, and starts it again.

        Other files of the task stay; files in memory (/dev/shm) are lost. Other services run on. This default does
        nothing: it is for a kind that has no image and no first process of its own.

        Raises: EnvironmentFailed, EngineUnavailable.
        """
        return Restart(killed=0)

    def reset(self) -> ResetProof:
        """Restores the state after creation: files, processes. Does not raise for what it cannot restore."""
        proof = self._reset()
        if self.receipt is not None:
            self.receipt.was_reset()
        return proof

    def destroy(self) -> None:
        """Ends it now, with everything in it. Safe to call twice, and from another thread to abort a command.

        Raises: EnvironmentFailed, EngineUnavailable: a part of it still exists. It cannot be used all the same, and the
        sweeper removes it.
        """
        self._destroy()
        if self.receipt is not None:
            self.receipt.was_destroyed()

    def _reset(self) -> ResetProof: ...

    def _destroy(self) -> None: ...


class EnvironmentProvider(Protocol):
    """Makes environments of one kind."""

    def kind_of(self, spec: EnvironmentSpec) -> str:
        """Returns the kind that `describe` would give for this spec's environment."""
        return spec.kind.value

    def tool_versions(self, spec: EnvironmentSpec) -> Mapping[str, str]:
        """Returns versions of the spec's tools by name, if mounted at a fixed path. Raises: AgentUnavailable."""
        return {}

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Finds, builds or pulls the image, only once for concurrent calls. Returns its identity.

        Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        ...

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> Environment:
        """Creates a fresh environment with the spec's limits, with its set-up commands done.

        Raises: EnvironmentFailed, ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        ...
