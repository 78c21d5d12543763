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
"""Describes a row by its dataset's own grading library: its commands and its parser, with the library's names.

Raises: UnknownName: the library does not know the row's repository, version or parser; GradingFailed: it cannot run.
"""


def no_library(judge: JudgeName, row: Mapping[str, Any]) -> dict[str, Any]:
    """Raises UnknownName, for readers that must not use a grading library."""
    raise UnknownName(f"expected the grading library {judge.value!r} to be at hand; found none here")


@dataclass(frozen=True, slots=True)
class Reading:
    """Options of reading: storage for folders, kind of environment, and the grading libraries."""

    pack: PackFolder
    kind: EnvironmentKind = EnvironmentKind.DOCKER
    describe: DescribeRow = no_library
    strict: bool = False  # also refuse what is otherwise only logged: for `megaflow dataset lint`
    cache: Path | None = None  # folder for repositories of task folders; None: none can be fetched


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """A public format of task folders."""

    name: str
    folders: Callable[[Path], list[Path]]  # task folders: the folder itself, or those in it
    task: Callable[[Path, Path, Reading], AgentTask]  # the task of such a folder in the dataset's folder

    def recognises(self, path: Path) -> bool:
        """Whether `path` (an existing file or folder) looks like this format. Reads little."""
        return path.is_dir() and bool(self.folders(path))

    def read(self, path: Path, reading: Reading) -> list[AgentTask]:
        """Returns all tasks, in the dataset's order.

        Raises: DatasetInvalid, which names the folder; then no task of the dataset is used.
        """
        return [self.task(folder, path, reading) for folder in self.folders(path) if inside(path, folder)]


@dataclass(frozen=True, slots=True)
class Row:
    """A row as read, its place for error messages, and the folder of its file, if it has one."""

    values: Mapping[str, Any]
    place: FaultPlace
    dataset: str
    folder: Path | None = None


class RowAdapter(Protocol):
    """Published rules of a dataset of rows: they turn a row into a task, without guessing."""

    name: ClassVar[str]  # name of the rules: several datasets may share them
    columns: ClassVar[frozenset[str]]  # a row without all of these belongs to another dataset

    def recognises(self, row: Mapping[str, Any]) -> bool:
        """Whether the row can only belong to this dataset: by columns that no other has, never by chance."""
        ...

    def task(self, row: Row, reading: Reading) -> AgentTask:
        """Returns the task that the row describes.

        Raises: DatasetInvalid: names the row, the field, what was expected and what was found.
        """
        ...
