"""Reads the columns of a row: text, lists, objects, commands and patches, in the forms that datasets use.

A dataset's hub stores a list as a list or as JSON in a text; its dumps may use the other form. Everything else is
refused with the row, the column, what was expected and what was found.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.datasets.base import Row
from app.datasets.faults import FaultPlace
from app.errors import DatasetInvalid
from app.models.spec import NAME, plain_text

_REPOSITORY = re.compile(r"[A-Za-z0-9_.-]{1,100}/[A-Za-z0-9_.-]{1,100}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIFF = re.compile(r"^diff --git |^--- .*\n\+\+\+ ", re.MULTILINE)
_COLUMNS_SHOWN = 12
_MOST_DEPTH = 24  # of an object that a goal stores


def present(row: Mapping[str, Any]) -> set[str]:
    """Returns the row's columns that have a value; tables give every row all columns, most of them empty."""
    return {column for column, value in row.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Columns of one row, or of an object in one of them; `prefix` names the latter: `install_config.`."""

    values: Mapping[str, Any]
    place: FaultPlace
    prefix: str = ""

    @classmethod
    def of(cls, row: Row, needed: Iterable[str], dataset: str) -> RowColumns:
        """Raises: DatasetInvalid: the row lacks a column that every row of `dataset` has."""
        missing = sorted(column for column in needed if row.values.get(column) is None)
        if missing:
            named, there = ", ".join(missing), ", ".join(sorted(map(str, row.values))[:_COLUMNS_SHOWN])
            if row.values.keys() >= {*missing}:
                raise row.place.fault(named, f"a value, as every row of {dataset} has one", None)
            known = f"the columns of {dataset}: {', '.join(sorted(needed))}"
            raise row.place.fault(named, known, None, f"the row has {there}")
        return cls(row.values, row.place)

    def given(self, column: str) -> bool:
        """Whether the column has a value other than an empty text or an empty list."""
        value = self.values.get(column)
        return value is not None and not (isinstance(value, str | list | tuple | dict) and not value)

    def fault(self, column: str, expected: str, fix: str = "") -> DatasetInvalid:
        """Returns the error to raise about a column's value."""
        return self.place.fault(f"{self.prefix}{column}", expected, self.values.get(column), fix)

    def text(self, column: str) -> str:
        value = self.text_or_nothing(column, "a text that is not empty")
        if not value.strip():
            raise self.fault(column, "a text that is not empty")
        return value

    def text_or_nothing(self, column: str, expected: str = "a text") -> str:
        """Returns a text, empty if the column is missing."""
        value = self.values.get(column)
        if value is not None and not isinstance(value, str):
            raise self.fault(column, expected)
        if value and not _plain(value):
            raise self.fault(column, f"{expected}, without NUL and halves of surrogate pairs")
        return value or ""

    def patch(self, column: str, *, needed: bool = False) -> str:
        """Returns a patch as text; empty if there is none and it is not `needed`."""
        value = self.text(column) if needed else self.text_or_nothing(column, "a patch as text")
        if value.strip() and not _DIFF.search(value):
            raise self.fault(column, "a diff, with `diff --git a/… b/…` or `--- ` and `+++ ` at the beginning of lines")
        return value

    def number(self, column: str) -> int:
        value = self.values.get(column)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
            raise self.fault(column, "a whole number")
        return value

    def name(self, column: str = "instance_id") -> str:
        """Returns an id that is valid in a task's name."""
        value = self.text(column)
        if not re.fullmatch(NAME, value) or ".." in value.split("/"):
            raise self.fault(column, "at most 200 letters, digits, and ._/+- after the first")
        return value

    def repository(self, column: str = "repo") -> tuple[str, str]:
        """Returns owner and name of `owner/name`."""
        value = self.text(column)
        owner, _, name = value.partition("/")
        if not _REPOSITORY.fullmatch(value) or {owner, name} & {".", ".."}:
            raise self.fault(column, "a repository as owner/name")
        return owner, name

    def commit(self, column: str = "base_commit", *, names: Collection[str] = ()) -> str:
        """Returns a whole commit. names: other allowed values."""
        value = self.text(column)
        if not _COMMIT.fullmatch(value) and value not in names:
            raise self.fault(column, " or ".join(("a commit of 40 hex digits", *names)))
        return value

    def folder_name(self, column: str) -> str:
        """Returns the name of one folder."""
        value = self.text(column)
        if not _REPOSITORY.fullmatch(f"x/{value}") or value in (".", ".."):
            raise self.fault(column, "a name of letters, digits, and ._-")
        return value

    def names(self, column: str, *, literals: bool = False) -> tuple[str, ...]:
        """Returns test names: a list, or a JSON list in a text; with `literals` also a Python list in a text."""
        value = self.values.get(column)
        names = _from_text(value, literals) if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise self.fault(column, "a list of test names, or one as a JSON string")
        return tuple(names)

    def commands(self, column: str) -> tuple[str, ...]:
        """Returns a command, or a list of them, or a JSON list in a text, as a tuple.

        Raises: DatasetInvalid: also when there are none.
        """
        value = self.values.get(column)
        commands = _from_text(value, False) if isinstance(value, str) else value
        lines = commands if isinstance(commands, list | tuple) else [value]
        if not lines or not all(isinstance(line, str) and line.strip() for line in lines):
            raise self.fault(column, "a command, or a list of commands")
        return tuple(lines)

    def commands_or_none(self, column: str) -> tuple[str, ...]:
        return self.commands(column) if self.given(column) else ()

    def inner(self, column: str) -> RowColumns:
        """Returns an object, or one as a JSON string, for reading in the same way."""
        value = self.values.get(column)
        values = _from_text(value, False) if isinstance(value, str) else value
        if not isinstance(values, Mapping):
            raise self.fault(column, "an object, or one as a JSON string")
        return RowColumns(values, self.place, f"{self.prefix}{column}.")

    def carried(self, *columns: str) -> dict[str, Any]:
        """Returns the columns unchanged, for the grader; missing ones are left out.

        Raises: DatasetInvalid: a value that the database cannot store, or that is nested too deep.
        """
        values = {column: self.values[column] for column in columns if self.values.get(column) is not None}
        for column, value in values.items():
            if not _storable(value):
                raise self.fault(column, "JSON without NUL, halves of surrogate pairs and endless nesting")
        return values

    def none_of(self, columns: Iterable[str], why: str) -> None:
        """Raises: DatasetInvalid: the row has one of these columns, so it belongs to another dataset."""
        for column in columns:
            if self.given(column):
                raise self.fault(column, "no such column", why)


def _from_text(text: str, literals: bool) -> object:
    readers: tuple[Callable[[str], object], ...] = (json.loads, ast.literal_eval) if literals else (json.loads,)
    for read in readers:
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return None


def _plain(text: str) -> bool:
    return plain_text(text) == text


def _storable(value: object, depth: int = 0) -> bool:
    match value:
        case str():
            return _plain(value)
        case bool() | int() | None:
            return True
        case float():
            return value == value and abs(value) != float("inf")
        case list() | tuple():
            return depth < _MOST_DEPTH and all(_storable(item, depth + 1) for item in value)
        case Mapping():
            return depth < _MOST_DEPTH and all(
                isinstance(key, str) and _storable(key) and _storable(item, depth + 1) for key, item in value.items()
            )
        case _:
            return False
