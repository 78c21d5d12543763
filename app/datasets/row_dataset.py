"""Defines a dataset of rows: its files, and the adapter with the rules of its authors."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from app.datasets.base import Reading, Row, RowAdapter
from app.datasets.entries import (
    ENTRY_COLUMNS,
    FIRST_FAULTS,
    LANGUAGE_COLUMNS,
    DatasetFault,
    DatasetOrigin,
    TaskEntry,
    entry_of,
    fault_of,
    refusal,
)
from app.datasets.faults import FaultPlace
from app.datasets.row_doubts import doubt
from app.datasets.row_files import RawRow, columns_of, digest_of, rows
from app.datasets.rows.own import OwnRows
from app.datasets.rows.swebench_pro import SCRIPTS, SweBenchProRows
from app.errors import DatasetInvalid, SpecInvalid, UnknownName
from app.models.spec import AgentTask

Refused = (SpecInvalid, UnknownName, ValidationError)
"""Errors that an adapter may raise for a bad row."""


@dataclass(frozen=True, slots=True)
class DatasetAddress:
    """Name and origin of a dataset."""

    name: str
    argument: str
    hub_id: str | None = None
    revision: str | None = None
    language: str | None = None  # of every row, if it has no language column
    path_languages: tuple[str, ...] = ()  # languages that a file's folder, or the start of its name, may give

    def language_of(self, file: Path) -> str | None:
        """Returns the language of a file's rows, if they have no language column."""
        candidates = (file.parent.name, file.name.partition("-")[0])
        return next((one for one in candidates if one in self.path_languages), self.language)

    def origin(self, content_hash: str, tasks: int, adapter: str, *, of_rows: bool = False) -> DatasetOrigin:
        """Returns the origin of the dataset at this address."""
        return DatasetOrigin(
            self.name, self.argument, content_hash, tasks, adapter, self.hub_id, self.revision, of_rows=of_rows
        )


@dataclass(slots=True)
class RowDataset:
    """Rows of one or several files, read lazily: only entries stay in memory, about 300 bytes each."""

    address: DatasetAddress
    files: Sequence[Path]
    adapter: RowAdapter
    reading: Reading
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)  # name: index of the file, number of the row
    _entries: list[TaskEntry] | None = None

    def __post_init__(self) -> None:
        self.reading = dataclasses.replace(self.reading, pack=cache(self.reading.pack))

    @property
    def name(self) -> str:
        return self.address.name

    def entries(self) -> Sequence[TaskEntry]:
        """Reads every row, checks its shape, and stores its entry. Raises: as `OpenedDataset.entries`."""
        if self._entries is None:
            entries: list[TaskEntry] = []
            faults: list[Exception] = []
            count = 0
            for one in self._scan():
                if isinstance(one, TaskEntry):
                    entries.append(one)
                    continue
                count += 1
                if len(faults) < FIRST_FAULTS:
                    faults.append(one)
            if count:
                raise refusal(self.address.argument, faults, count)
            if not entries:
                raise DatasetInvalid(f"{self.files[0]}: expected at least one row; found none")
            self._entries = entries
        return self._entries

    def tasks(self, chosen: Collection[str] | None = None) -> Iterator[AgentTask]:
        """Raises: as `OpenedDataset.tasks`: every chosen row is read before the refusal, to name the first ten."""
        self.entries()
        faults: list[Exception] = []
        count = 0
        for raw in self._raw(chosen):
            try:
                task = self._task(raw)
            except Refused as error:
                count += 1
                if len(faults) < FIRST_FAULTS:
                    faults.append(_named(error, raw))
                continue
            if not count:
                yield task
        if count:
            raise refusal(self.address.argument, faults, count)

    def copy(self, chosen: Collection[str], folder: Path) -> None:
        """Writes `rows.jsonl`, with folders that rows are built from and the language given by a file's path."""
        for _ in self.tasks(chosen):  # refuses bad rows before anything is written
            pass
        contexts: dict[Path, Path] = {}
        with (folder / "rows.jsonl").open("x", encoding="utf-8") as file:
            for raw in self._raw(chosen):
                row = dict(raw.values)
                language = self.address.language_of(raw.file)
                if language is not None and not any(row.get(column) for column in LANGUAGE_COLUMNS):
                    row["language"] = language
                if self.adapter.name == OwnRows.name and row.get("build_context"):
                    home = raw.file.parent.resolve()
                    context = (home / row["build_context"]).resolve()  # below `home`: checked when the task was made
                    row["build_context"] = context.relative_to(home).as_posix()
                    contexts[folder / row["build_context"]] = context
                if self.adapter.name == SweBenchProRows.name:
                    scripts = Path(SCRIPTS, str(row["instance_id"]))  # a valid task name, checked before
                    contexts[folder / scripts] = raw.file.parent / scripts
                file.write(json.dumps(row) + "\n")
        for to, context in contexts.items():
            if to == folder:
                raise _fault(f"{context}", "build_context", "a folder below that of the rows, to copy it; found that")
            shutil.copytree(context, to, symlinks=True, dirs_exist_ok=True)

    def checked(self) -> Iterator[DatasetFault | None]:
        """Yields as `OpenedDataset.checked`: rows of a bad shape first, then the adapter's result for the others."""
        for one in self._scan():
            if isinstance(one, DatasetInvalid):
                yield fault_of(one, self.address.argument)
        spelled = {name.lower(): name for name in reversed(self._places)}
        for raw in self._raw(set(self._places)):
            try:
                fault = doubt(raw, self._task(raw), spelled)
                yield None if fault is None else fault_of(fault, raw.place.where)
            except Refused as error:
                yield fault_of(_named(error, raw), raw.place.where)

    def origin(self) -> DatasetOrigin:
        """Raises: as `OpenedDataset.origin`."""
        try:
            content_hash = digest_of(self.files)
        except OSError as error:
            raise DatasetInvalid(f"dataset {self.address.argument}: expected readable files; found {error}") from error
        return self.address.origin(content_hash, len(self.entries()), self.adapter.name, of_rows=True)

    def columns(self) -> list[str]:
        """Returns the columns of its first file. Raises: DatasetInvalid, DependencyMissing."""
        return columns_of(self.files[0])

    def _scan(self) -> Iterator[TaskEntry | DatasetInvalid]:
        self._places.clear()
        for place, file in enumerate(self.files):
            parquet = file.suffix == ".parquet"
            if parquet and (missing := self.adapter.columns - set(columns_of(file))):
                yield self._without(f"{file}", missing, set(columns_of(file)))
                continue
            for raw in rows(file, columns=ENTRY_COLUMNS):
                if raw.fault is not None:
                    yield raw.fault
                elif not parquet and (missing := self.adapter.columns - raw.values.keys()):
                    yield self._without(raw.place.where, missing, raw.values.keys())
                else:
                    yield self._entry(raw, place)

    def _entry(self, raw: RawRow, place: int) -> TaskEntry | DatasetInvalid:
        try:
            entry = entry_of(raw.values, raw.place, self.address.language_of(raw.file))
        except DatasetInvalid as error:
            return error
        if earlier := self._places.get(entry.name):
            file, number = self.files[earlier[0]], earlier[1]
            fault = f"one task of each name; found {entry.name!r} twice, first in {file.name}, row {number}"
            return _fault(raw.place.where, "instance_id", fault)
        self._places[entry.name] = (place, raw.number)
        return entry

    def _without(self, where: str, missing: Collection[str], found: Set[str]) -> DatasetInvalid:
        names, others = ", ".join(sorted(missing)), found - self.adapter.columns
        near = [
            f"{one!r} for {name!r}?"
            for name in sorted(missing)
            for one in get_close_matches(name, others, n=1, cutoff=0.8)
        ]
        hint = " ".join(near) or "another dataset?"
        return _fault(where, names, f"the columns of {self.adapter.name}; found none of that name; {hint}")

    def _raw(self, chosen: Collection[str] | None) -> Iterator[RawRow]:
        numbers: dict[int, set[int]] = {place: set() for place in range(len(self.files))}
        for name in self._places if chosen is None else chosen:
            if name in self._places:
                place, number = self._places[name]
                numbers[place].add(number)
        for place, file in enumerate(self.files):
            if numbers[place]:
                yield from rows(file, chosen=numbers[place])

    def _task(self, raw: RawRow) -> AgentTask:
        row = Row(values=raw.values, place=raw.place, dataset=self.name, folder=raw.file.parent)
        with raw.place.named():
            task = self.adapter.task(row, self.reading)
        name = entry_of(raw.values, raw.place, None).name
        if task.name != name:  # it was chosen by that name
            raise raw.place.fault("instance_id", f"the task's name to be {name!r}", task.name)
        return task


def _fault(where: str, field_name: str, expected_and_found: str) -> DatasetInvalid:
    return FaultPlace(where).said(f"field {field_name}: expected {expected_and_found}", field_name)


def _named(error: Exception, raw: RawRow) -> DatasetInvalid:
    if isinstance(error, DatasetInvalid) and raw.place.where in str(error):
        return error
    return raw.place.said(str(error))
