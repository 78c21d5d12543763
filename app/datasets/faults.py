"""Formats a dataset's fault: place, field, what was expected, what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from app.errors import DatasetInvalid, SpecInvalid, explained

_SHOWN_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class FaultPlace:
    """A row or a folder, in words for people: `rows.jsonl, row 3 (django__django-13251)`."""

    where: str

    def fault(self, field: str, expected: str, found: object, fix: str = "") -> DatasetInvalid:
        """Returns the error to raise; `found` is shown shortened."""
        tail = f"; {fix}" if fix else ""
        return self.said(f"field {field}: expected {expected}; found {shown(found)}{tail}", field)

    def said(self, what: str, field: str = "") -> DatasetInvalid:
        """Returns the error with any message."""
        error = DatasetInvalid(f"{self.where}: {what}")
        error.where, error.field = self.where, field
        return error

    @contextmanager
    def named(self) -> Iterator[None]:
        """Adds this place to errors that the block raises."""
        try:
            yield
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["type"] == "value_error":  # its message already has what was expected and found
                raise DatasetInvalid(f"{self.where}: {first['ctx']['error']}") from error
            field = ".".join(str(part) for part in first["loc"]) or "(all of it)"
            raise self.fault(field, expected(first), first["input"]) from error
        except DatasetInvalid:
            raise
        except SpecInvalid as error:
            raise DatasetInvalid(f"{self.where}: {error}") from error


def expected(error: Mapping[str, Any]) -> str:
    """Returns what one of pydantic's errors expects, as text that follows `expected`."""
    return explained(error).removeprefix("expected ")


def shown(value: object) -> str:
    """Returns a value for a message, on one line and not too long."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
