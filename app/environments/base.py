"""The contract of an environment: the container (or folder) in which an agent acts.

Whoever creates one owns it and ends it with `destroy`; a sweeper reaps by label what its owner could not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID, uuid4

from app.models.shell import CommandResult, Shell
from app.models.spec import EnvironmentSpec

__all__ = [
    "CommandResult",
    "Environment",
    "EnvironmentProvider",
    "Origin",
    "ResetProof",
    "Route",
    "Stats",
    "Tags",
    "Times",
]


class Origin(StrEnum):
    """Where an environment came from."""

    FRESH = "fresh"  # made for this attempt
    RECYCLED = "recycled"  # used by an earlier task, reset, proven clean


class Route(StrEnum):
    """By which way an environment came to its attempt: what its phase times are to be compared with."""

    COLD = "cold"  # made while the attempt waited
    WARM = "warm"  # made ahead, unused
    RECYCLED = "recycled"  # used by another task, reset, proven clean
    SNAPSHOT = "snapshot"  # made from what a set-up left


@dataclass
class Times:
    """How long each phase of one environment took, in seconds. A reset begins anew: it is the next attempt's start.

    Phases: `image`, `create`, `start`, `session` (until the first answer), `set_up`, `reset`, `teardown`.
    """

    route: Route = Route.COLD
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = time.monotonic() - begun

    def describe(self) -> dict[str, Any]:
        """`path` and `phases`, to the tenth of a millisecond, as an attempt records them."""
        return {"path": self.route.value, "phases": {name: round(s, 4) for name, s in self.phases.items()}}


@dataclass(frozen=True, slots=True)
class Stats:
    """What an environment uses now; None where the kernel does not show it."""

    processes: int
    memory_bytes: int | None
    memory_peak_bytes: int | None
    cpu_s: float | None
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class Tags:
    """Who an environment belongs to; every object created carries these as labels."""

    installation: str
    instance_id: UUID
    run_id: UUID
    task_id: UUID
    attempt_id: UUID
    deadline_unix_s: float

    def labels(self) -> dict[str, str]:
        """`megaflow` and its finer ones, as Docker labels."""
        return {
            "megaflow": self.installation,
            "megaflow.instance": str(self.instance_id),
            "megaflow.run": str(self.run_id),
            "megaflow.task": str(self.task_id),
            "megaflow.attempt": str(self.attempt_id),
            "megaflow.deadline": f"{self.deadline_unix_s:.0f}",
        }

    def name(self) -> str:
        """`megaflow-ATTEMPT-RANDOM-DEADLINE`: another each time. The sweeper goes by its deadline."""
        return f"megaflow-{self.attempt_id}-{uuid4().hex[:6]}-{self.deadline_unix_s:.0f}"


@dataclass(frozen=True, slots=True)
class ResetProof:
    """What a reset found and did. `clean` is False when something could not be restored: then replace it."""

    clean: bool
    removed: int = 0
    restored: int = 0
    killed: int = 0
    left: tuple[str, ...] = field(default=())  # what could not be mended


class Environment(Shell, Protocol):
    """One live environment."""

    @property
    def id(self) -> str:
        """The provider's own identifier, e.g. the container's."""
        ...

    def describe(self) -> dict[str, Any]:
        """Kind, id, image, origin, `path` and `phases` (`Times.describe`): what an attempt records about it.

        Answers after the end, too; then with the time of the teardown.
        """
        ...

    def stats(self) -> Stats:
        """What it uses now. Raises: EnvironmentFailed."""
        ...

    def reset(self) -> ResetProof:
        """Bring it back to how it was after creation: files, processes. Does not raise for what it cannot mend."""
        ...

    def destroy(self) -> None:
        """End it now, with everything in it. Safe to call twice, and from another thread to abort a command."""
        ...


class EnvironmentProvider(Protocol):
    """Makes environments of one kind."""

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Have the image here: found, built or pulled, once however many ask. Returns its identity.

        Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        ...

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> Environment:
        """A fresh environment with the spec's limits, its set-up commands done.

        Raises: EnvironmentFailed, ImageUnavailable, EngineUnavailable, DiskFull.
        """
        ...

    def sweep(self, *, installation: str, keep: Mapping[str, bool] | None = None) -> list[str]:
        """Remove every environment of `installation` but those that `keep` maps to True (by id).

        Returns the ids removed. Other objects of the installation (instances, services) are not touched.
        """
        ...
