"""What an environment of several containers offers beyond every environment's contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from app.models.shell import CommandResult, Shell


@dataclass(frozen=True, slots=True)
class Things:
    """Ids of what stands on the engine for one environment, for a record."""

    containers: tuple[str, ...]
    networks: tuple[str, ...]
    volumes: tuple[str, ...]

    @property
    def none(self) -> bool:
        return not (self.containers or self.networks or self.volumes)


@runtime_checkable
class Several(Protocol):
    """An environment with services beside the one in which the agent acts."""

    @property
    def services(self) -> tuple[str, ...]:
        """All of them, by name, the main one too."""
        ...

    def service(self, name: str) -> Shell:
        """Commands and files in one of the services, for grading and for evidence.

        Raises: EnvironmentFailed: no such service.
        """
        ...

    def run_in(self, service: str, command: str, *, timeout_s: float) -> CommandResult:
        """One command in any of the services. Raises: EnvironmentFailed."""
        ...

    def logs(self) -> dict[str, bytes]:
        """What each service has written, while it stands; of much the end (2 MB or 4). Never raises."""
        ...

    def assure(self) -> None:
        """See `Services`. Raises: EnvironmentFailed, EngineUnavailable."""
        ...

    def things(self) -> Things:
        """A reset makes others. Raises: EnvironmentFailed, EngineUnavailable."""
        ...
