"""The contract of an environment: the container (or folder) in which an agent acts.

Whoever creates one owns it and ends it with `destroy`; a sweeper reaps by label what its owner could not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID

from app.models.shell import CommandResult, Shell
from app.models.spec import EnvironmentSpec

__all__ = ["CommandResult", "Environment", "EnvironmentProvider", "Origin", "ResetProof", "Tags"]


class Origin(StrEnum):
    """Where an environment came from."""

    FRESH = "fresh"  # made for this attempt
    RECYCLED = "recycled"  # used by an earlier task, reset, proven clean


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
        """Kind, id, image, origin: what an attempt records about it."""
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
