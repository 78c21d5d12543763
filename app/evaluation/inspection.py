"""Looks at datasets without submitting them, for `megaflow dataset`. Nothing is put into the artifact store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from app.datasets.entries import DatasetFault, OpenedDataset, fault_of
from app.datasets.source import open_dataset
from app.errors import DatasetInvalid, DatasetUnknown, SpecInvalid
from app.evaluation.submission import reading_of
from app.models.spec import EnvironmentKind
from app.settings import Settings

_NUMBER = re.compile(r"(\d+)")


def _by_task(where: str) -> list[tuple[str, int]]:
    """`row 9` before `row 10`."""
    parts = _NUMBER.split(where)
    return [(text, int(number or 0)) for text, number in zip(parts[::2], [*parts[1::2], ""], strict=True)]


@dataclass(frozen=True, slots=True)
class LintFindings:
    """Every fault of a dataset, and how many of its tasks have none."""

    tasks: int
    faults: tuple[DatasetFault, ...]


@contextmanager
def opened(
    name: str, settings: Settings, kind: EnvironmentKind = EnvironmentKind.DOCKER, *, strict: bool = False
) -> Iterator[OpenedDataset]:
    """The dataset that an argument names. strict: as `Reading.strict`.

    Raises: as `open_dataset` and what is done with it; no plain OSError.
    """
    try:
        with reading_of(settings, kind, store=False) as reading:
            yield open_dataset(name, replace(reading, strict=strict))
    except OSError as error:
        raise DatasetInvalid(f"dataset {name!r}: expected to read it; found {error}") from error


def linted(name: str, settings: Settings, kind: EnvironmentKind = EnvironmentKind.DOCKER) -> LintFindings:
    """Read every row or folder through its rules.

    Raises: DatasetUnknown, UnknownName, DatasetUnavailable, DependencyMissing: it cannot be read at all.
    """
    try:
        with opened(name, settings, kind, strict=True) as dataset:
            found = list(dataset.checked())
            faults = tuple(sorted(filter(None, found), key=lambda one: _by_task(one.where)))
            if not faults:
                dataset.entries()  # says what is missing, and which two have one name
    except DatasetUnknown:
        raise
    except SpecInvalid as error:
        return LintFindings(0, (fault_of(error, name),))
    return LintFindings(found.count(None), faults)
