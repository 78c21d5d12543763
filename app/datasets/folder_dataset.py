"""Defines datasets of task folders, and of several parts, for example rows and folders in the demo."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.datasets.base import DatasetFormat, Reading
from app.datasets.entries import DatasetFault, DatasetOrigin, OpenedDataset, TaskEntry, fault_of, refusal
from app.datasets.row_dataset import DatasetAddress, Refused
from app.errors import DatasetInvalid
from app.models.spec import AgentTask

_LEFT_OUT = {".git", "__pycache__"}


@dataclass(slots=True)
class FolderDataset:
    """Task folders in one format: those of `folders`, or, when it is empty, all of `root`."""

    address: DatasetAddress
    root: Path
    format: DatasetFormat
    reading: Reading
    folders: Sequence[Path] = ()
    _tasks: list[AgentTask] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.address.name

    def entries(self) -> Sequence[TaskEntry]:
        """Reads and stores every folder. Raises: as `OpenedDataset.entries`."""
        return [TaskEntry(task.name) for task in self._all()]

    def tasks(self, chosen: Collection[str] | None = None) -> Iterator[AgentTask]:
        """Raises: as `entries`."""
        return (task for task in self._all() if chosen is None or task.name in chosen)

    def copy(self, chosen: Collection[str], folder: Path) -> None:
        """Copies each task's folder unchanged, without `.git`."""
        for one in self._each():
            if any(task.name in chosen for task in self._read(one)):
                ignored = shutil.ignore_patterns(*_LEFT_OUT)
                shutil.copytree(one, folder / one.resolve().name, symlinks=True, ignore=ignored)

    def checked(self) -> Iterator[DatasetFault | None]:
        for folder in self._each():
            try:
                self._read(folder)
                yield None
            except (*Refused, OSError) as error:
                yield fault_of(error, str(folder))

    def origin(self) -> DatasetOrigin:
        """Raises: as `OpenedDataset.origin`."""
        tasks = len(self.entries())
        digest = hashlib.sha256()
        for folder in self.folders or [self.root]:
            digest.update(folder_digest(folder))
        return self.address.origin(digest.hexdigest(), tasks, self.format.name)

    def columns(self) -> list[str]:
        """Returns an empty list: folders have no columns."""
        return []

    def _all(self) -> list[AgentTask]:
        if not self._tasks:
            tasks = self.format.read(self.root, self.reading) if not self.folders else self._chosen()
            if not tasks:
                expected = f"task folders in the format {self.format.name}"
                raise DatasetInvalid(f"dataset {self.address.argument}: {self.root}: expected {expected}; found none")
            self._tasks = [task.model_copy(update={"dataset": self.name}) for task in tasks]
        return self._tasks

    def _chosen(self) -> list[AgentTask]:
        tasks: list[AgentTask] = []
        faults: list[Exception] = []
        for folder in self.folders:
            try:
                tasks += self._read(folder)
            except Refused as error:
                faults.append(error)
        if faults:
            raise refusal(self.address.argument, faults, len(faults))
        return tasks

    def _each(self) -> Iterator[Path]:
        if self.folders:
            yield from self.folders
        elif any((self.root / file).is_file() for file in TASK_FILES):
            yield self.root
        else:
            children = sorted(child for child in self.root.iterdir() if child.is_dir())
            yield from (child for child in children if any((child / file).is_file() for file in TASK_FILES))

    def _read(self, folder: Path) -> list[AgentTask]:
        if not self.format.recognises(folder):
            raise DatasetInvalid(f"{folder}: expected a task folder in the format {self.format.name}; found none")
        return self.format.read(folder, self.reading)


TASK_FILES = ("task.toml", "task.yaml")
"""Files that mark a folder as a task: Harbor's, the first Terminal-Bench's."""


@dataclass(slots=True)
class SeveralDatasets:
    """Parts of one folder as one dataset."""

    address: DatasetAddress
    parts: Sequence[OpenedDataset]

    @property
    def name(self) -> str:
        return self.address.name

    def entries(self) -> Sequence[TaskEntry]:
        """Raises: as `OpenedDataset.entries`; DatasetInvalid: a name occurs twice."""
        entries = [entry for part in self.parts for entry in part.entries()]
        refuse_doubles((entry.name for entry in entries), self.address.argument)
        return entries

    def tasks(self, chosen: Collection[str] | None = None) -> Iterator[AgentTask]:
        """Raises: as `OpenedDataset.tasks`."""
        for part in self.parts:
            for task in part.tasks(chosen):
                yield task.model_copy(update={"dataset": self.name})

    def copy(self, chosen: Collection[str], folder: Path) -> None:
        """Copies each part that has some of them into its own folder."""
        for number, part in enumerate(self.parts):
            if own := {entry.name for entry in part.entries()} & set(chosen):
                (folder / f"part-{number}").mkdir()
                part.copy(own, folder / f"part-{number}")

    def checked(self) -> Iterator[DatasetFault | None]:
        for part in self.parts:
            yield from part.checked()

    def origin(self) -> DatasetOrigin:
        """Raises: as `OpenedDataset.origin`."""
        origins = [part.origin() for part in self.parts]
        digest = hashlib.sha256("".join(one.content_hash for one in origins).encode())
        adapters = ", ".join(dict.fromkeys(one.adapter for one in origins))
        return self.address.origin(digest.hexdigest(), sum(one.tasks for one in origins), adapters)

    def columns(self) -> list[str]:
        """Returns the columns of all parts with rows."""
        return list(dict.fromkeys(column for part in self.parts for column in part.columns()))


def refuse_doubles(names: Iterator[str] | Sequence[str], argument: str) -> None:
    """Raises: DatasetInvalid."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DatasetInvalid(f"dataset {argument!r}: expected one task of each name; found {name!r} twice")
        seen.add(name)


def folder_digest(folder: Path) -> bytes:
    """Returns the sha256 of all files below a folder with path and x bit; for a link, of its target path.

    `.git` and `__pycache__` do not count. Raises: DatasetInvalid: a file cannot be read, or is of another kind.
    """
    digest = hashlib.sha256()
    try:
        for path, kind in _below(folder):
            name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
            digest.update(b"%s %d %s\0" % (kind, len(name), name))
            if kind == b"link":
                target = os.readlink(path).encode("utf-8", "surrogateescape")
                digest.update(b"%d %s\0" % (len(target), target))
                continue
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise DatasetInvalid(f"{folder}: expected to read every file of it; found {error}") from error
    return digest.digest()


def _below(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yields files and links below, sorted, each with its kind."""
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        path = Path(entry.path)
        if entry.is_symlink():
            yield path, b"link"
        elif entry.is_dir(follow_symlinks=False):
            if entry.name not in _LEFT_OUT:
                yield from _below(path)
        elif entry.is_file(follow_symlinks=False):
            yield path, b"exec" if entry.stat(follow_symlinks=False).st_mode & 0o100 else b"file"
        else:
            raise DatasetInvalid(f"{path}: expected a file, a folder or a link; found a pipe, a socket or a device")
