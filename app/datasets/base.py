"""Defines the interface of a dataset format: reads files and yields agent tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from app.models.spec import AgentTask, Bundle, EnvironmentKind

PackFolder = Callable[[Path], Bundle]
"""Stores a folder in the artifact store and returns its address."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: where folders are stored, and the kind of environment that the user asked for."""

    pack: PackFolder
    kind: EnvironmentKind = EnvironmentKind.DOCKER


class DatasetFormat(Protocol):
    """One public format."""

    name: ClassVar[str]

    def recognises(self, path: Path) -> bool:
        """True when `path` (a file or a folder that exists) looks like this format. Reads little."""
        ...

    def read(self, path: Path, reading: Reading) -> list[AgentTask]:
        """All tasks, in the dataset's order.

        Raises: DatasetInvalid naming the row or folder; then nothing of the dataset is used.
        """
        ...
