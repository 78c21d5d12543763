"""Defines dependencies of a run: earlier tasks that must succeed, and their artifacts as input files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Protocol
from uuid import UUID

from app.errors import OptionInvalid, UnknownName
from app.models.outcome import ArtifactKind

MOST_UPSTREAM = 1000
"""Limit of the tasks that one run depends on."""
MOST_INPUTS = 100
"""Limit of the input files of a task."""
_MOST_PATH = 4096

UPSTREAM_NOT_SUCCEEDED = "UpstreamNotSucceeded"
"""`Failure.error` of a task that never began because a task it depends on did not succeed."""


@dataclass(frozen=True, slots=True)
class ArtifactReference:
    """An artifact of a task's last attempt, which may be in the future."""

    task_id: UUID
    kind: ArtifactKind
    __pydantic_config__: ClassVar = {"extra": "forbid"}  # an unknown key in a request is an error

    @classmethod
    def of(cls, task_id: UUID, kind: ArtifactKind | str) -> ArtifactReference:
        """Raises: UnknownName: no such kind."""
        try:
            return cls(task_id, ArtifactKind(kind))
        except ValueError:
            raise UnknownName.of("artifact", str(kind), [one.value for one in ArtifactKind]) from None


class KnownTask(Protocol):
    """An accepted task, such as a handle."""

    @property
    def task_id(self) -> UUID: ...


@dataclass(frozen=True, slots=True)
class ComesAfter:
    """Dependencies of a run: tasks, and artifacts of tasks (`inputs`, by path in the environment)."""

    tasks: frozenset[UUID] = frozenset()
    inputs: Mapping[str, ArtifactReference] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, after: Iterable[KnownTask], inputs: Mapping[str, ArtifactReference] | None = None) -> ComesAfter:
        """Builds the dependencies from task handles and artifacts by path. Raises: OptionInvalid: other types."""
        try:
            files = {path: ArtifactReference(one.task_id, one.kind) for path, one in (inputs or {}).items()}
            return cls(frozenset(handle.task_id for handle in after), files)
        except (AttributeError, TypeError):
            raise OptionInvalid(
                f"expected after=[handle] and inputs={{'/inputs/first.diff': handle.artifact('patch')}}, of tasks that"
                f" were accepted, found after={after!r:.200} and inputs={inputs!r:.200}; nothing was submitted"
            ) from None

    @property
    def all(self) -> frozenset[UUID]:
        """All tasks that must succeed first."""
        return self.tasks | {one.task_id for one in self.inputs.values()}

    def rows(self) -> set[tuple[UUID, str, str]]:
        """Returns the rows to store: task, path and artifact kind; the last two are empty without an artifact."""
        files = {(one.task_id, path, one.kind.value) for path, one in self.inputs.items()}
        return files | {(task_id, "", "") for task_id in self.all - {row[0] for row in files}}

    def check(self) -> None:
        """Raises: OptionInvalid: too many tasks or inputs, or an invalid path."""
        for what, count, most in (
            ("tasks to come after", len(self.all), MOST_UPSTREAM),
            ("inputs", len(self.inputs), MOST_INPUTS),
        ):
            if count > most:
                raise OptionInvalid(f"expected at most {most} {what}, found {count}; nothing was submitted")
        for path in self.inputs:
            parts = path.split("/")
            if parts[0] or not all(parts[1:]) or {".", ".."} & set(parts) or len(parts) < 2 or not path.isprintable():
                raise OptionInvalid(
                    f"expected an input's path to be absolute, a file's and without `.` and `..`, such as"
                    f" /inputs/first.diff, found {path[:200]!r}; nothing was submitted"
                )
            if len(path.encode()) > _MOST_PATH:
                raise OptionInvalid(f"expected an input's path of at most {_MOST_PATH} bytes; nothing was submitted")


NO_UPSTREAM = ComesAfter()
