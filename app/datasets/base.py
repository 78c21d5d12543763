"""Defines formats of task folders, and the interface of the rules of a dataset of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from app.datasets.faults import FaultPlace
from app.errors import UnknownName
from app.models.spec import AgentTask, Bundle, EnvironmentKind, JudgeName
from app.task_files import inside

PackFolder = Callable[[Path], Bundle]
"""Stores a folder in the artifact store and returns its address."""
DescribeRow = Callable[[JudgeName, Mapping[str, Any]], dict[str, Any]]
"""What a dataset's own grading library says of a row: its commands and its parser, by the library's names.

Raises: UnknownName: the library does not know the row's repository, version or parser; GradingFailed: it cannot run.
"""


def no_library(judge: JudgeName, row: Mapping[str, Any]) -> dict[str, Any]:
    """For readers that must not ask a grading library. Raises: UnknownName."""
    raise UnknownName(f"expected the grading library {judge.value!r} to be at hand; found none here")


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: where folders are stored, the kind of environment asked for, and the grading libraries."""

    pack: PackFolder
    kind: EnvironmentKind = EnvironmentKind.DOCKER
    describe: DescribeRow = no_library
    strict: bool = False  # refuse also what is else passed over with a line in the log: for `megaflow dataset lint`
    cache: Path | None = None  # where repositories of task folders are kept; None: none can be fetched


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """A public format of task folders."""

    name: str
    folders: Callable[[Path], list[Path]]  # of tasks: a folder itself, or those in it
    task: Callable[[Path, Path, Reading], AgentTask]  # of such a folder in the dataset's

    def recognises(self, path: Path) -> bool:
        """True when `path` (a file or a folder that exists) looks like this format. Reads little."""
        return path.is_dir() and bool(self.folders(path))

    def read(self, path: Path, reading: Reading) -> list[AgentTask]:
        """All tasks, in the dataset's order.

        Raises: DatasetInvalid naming the folder; then nothing of the dataset is used.
        """
        return [self.task(folder, path, reading) for folder in self.folders(path) if inside(path, folder)]


@dataclass(frozen=True, slots=True)
class Row:
    """One row as read, where it stands for a person, and the folder of its file, where it has one."""

    values: Mapping[str, Any]
    place: FaultPlace
    dataset: str
    folder: Path | None = None


class RowAdapter(Protocol):
    """The published rules of one dataset of rows: from a row to a task, and nothing guessed."""

    name: ClassVar[str]  # of the rules: several datasets may share them
    columns: ClassVar[frozenset[str]]  # without all of these a row is of another dataset

    def recognises(self, row: Mapping[str, Any]) -> bool:
        """True when the row can only be of this dataset: by columns that no other has, never by chance."""
        ...

    def task(self, row: Row, reading: Reading) -> AgentTask:
        """The task that the row describes.

        Raises: DatasetInvalid: names the row, the field, what was expected and what was found.
        """
        ...
