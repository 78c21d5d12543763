"""Chooses tasks of a dataset by their entries, and merges several datasets into one pool."""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from app.datasets.entries import OpenedDataset, TaskEntry
from app.errors import DatasetInvalid, OptionInvalid, SpecInvalid
from app.models.spec import NAME, AgentTask, PlainText, Wire

_BOUND = re.compile(r"\s*(?:(?P<low>[0-9.]+)\s*(?P<above><=?))?\s*p\s*(?:(?P<below><=?)\s*(?P<high>[0-9.]+))?\s*")
_NAME = re.compile(NAME)
_LESS: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le}


def within(bounds: str) -> Callable[[float], bool]:
    """Returns a check of a pass rate against bounds such as `0<p<1`, `p<=0.5` or `0.2<=p`. Raises: OptionInvalid."""
    match = _BOUND.fullmatch(bounds)
    try:
        low = float(match["low"]) if match and match["low"] else None
        high = float(match["high"]) if match and match["high"] else None
    except ValueError:
        match = low = high = None
    if match is None or (low is None and high is None) or not 0 <= (low or 0.0) <= (1.0 if high is None else high) <= 1:
        raise OptionInvalid(
            f"expected bounds of a pass rate from 0 to 1, such as '0<p<1' or 'p<=0.5'; found {bounds!r}"
        )
    above, below = _LESS[match["above"] or "<="], _LESS[match["below"] or "<="]
    return lambda rate: (low is None or above(low, rate)) and (high is None or below(rate, high))


def _bounds(value: str) -> str:
    try:
        within(value)
    except SpecInvalid as error:
        raise ValueError(str(error)) from error
    return value


def _in_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


Moment = Annotated[datetime, AfterValidator(_in_utc)]
"""A date with a time zone; UTC when none is given."""


class Selection(Wire):
    """Conditions that choose tasks of a pool. All must be met; an empty one or None does not restrict.

    The order: conditions, then the sample, then the limit. A sample keeps the pool's order.
    """

    only: tuple[PlainText, ...] = ()  # names, or patterns of them (`*`, `?`, `[…]`)
    exclude: tuple[PlainText, ...] = ()  # names or patterns to leave out
    languages: tuple[PlainText, ...] = ()  # as named in the dataset, in any case
    repositories: tuple[PlainText, ...] = ()  # OWNER/NAME, or patterns of it
    since: Moment | None = None  # created then or later
    until: Moment | None = None  # created before
    pass_rate: Annotated[str, AfterValidator(_bounds)] | None = None  # `0<p<1`
    pass_rate_from: PlainText | None = None  # the run that has these pass rates
    sample: int | None = Field(default=None, ge=1)
    sample_seed: int = Field(default=0, ge=0)
    limit: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> Selection:
        if (self.pass_rate is None) != (self.pass_rate_from is None):
            raise ValueError(
                "expected the bounds of a pass rate together with the run that it is of; found one of them"
            )
        if self.since is not None and self.until is not None and self.until <= self.since:
            raise ValueError(f"expected an end after {self.since.isoformat()}; found {self.until.isoformat()}")
        return self

    def conditions(self) -> dict[str, object]:
        """Returns the given conditions, as JSON values; the seed only with a sample."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        return fields | ({"sample_seed": self.sample_seed} if self.sample is not None else {})


def choose(
    entries: Sequence[TaskEntry], selection: Selection, dataset: str, pass_rates: Mapping[str, float] | None = None
) -> list[TaskEntry]:
    """Returns the chosen entries, in their order. pass_rates: of the run `selection.pass_rate_from`, by task name.

    Raises: OptionInvalid: a pattern, language or repository that no task has, a condition on a property that the
        dataset lacks, or nothing is left.
    """
    names = {entry.name for entry in entries}
    chosen = _matching(selection.only, names, dataset) if selection.only else names
    chosen = chosen - _matching(selection.exclude, names, dataset)
    left = [entry for entry in entries if entry.name in chosen]
    for condition in _conditions(entries, selection, dataset, pass_rates or {}):
        left = [entry for entry in left if condition(entry)]
    if selection.sample is not None and selection.sample < len(left):
        drawn = set(sorted((entry.name for entry in left), key=_draw(selection.sample_seed))[: selection.sample])
        left = [entry for entry in left if entry.name in drawn]
    if not left:
        raise OptionInvalid(
            f"dataset {dataset!r}: expected a task that meets all of {selection.conditions()}; found none among"
            f" {len(entries)}; leave one of them out"
        )
    return left[: selection.limit]


def _draw(seed: int) -> Callable[[str], bytes]:
    """Returns a function that gives each name a number, the same on every machine and in every pool."""
    return lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest()


Condition = Callable[[TaskEntry], bool]


def _conditions(
    entries: Sequence[TaskEntry], selection: Selection, dataset: str, pass_rates: Mapping[str, float]
) -> Iterator[Condition]:
    if selection.languages:
        yield _language_is(entries, selection.languages, dataset)
    if selection.repositories:
        yield _repository_is(entries, selection.repositories, dataset)
    if selection.since is not None or selection.until is not None:
        yield _created_between(entries, selection.since, selection.until, dataset)
    if selection.pass_rate is not None:
        fits = within(selection.pass_rate)
        if not any(entry.name in pass_rates for entry in entries):
            raise OptionInvalid(
                f"dataset {dataset!r}: expected scored tasks of it in run {selection.pass_rate_from!r}; found none"
            )
        yield lambda entry: fits(pass_rates.get(entry.name, math.nan))


def _language_is(entries: Sequence[TaskEntry], languages: Sequence[str], dataset: str) -> Condition:
    known = {entry.language for entry in entries} - {None}
    names = {language.lower() for language in languages}
    if missing := names - known:
        raise OptionInvalid(
            f"dataset {dataset!r}: expected tasks in {', '.join(sorted(missing))}; found"
            f" {', '.join(sorted(filter(None, known))) or 'that it does not say in which language its tasks are'}"
        )
    return lambda entry: entry.language in names


def _repository_is(entries: Sequence[TaskEntry], patterns: Sequence[str], dataset: str) -> Condition:
    known = {entry.repository for entry in entries if entry.repository is not None}
    repositories = _matching(patterns, known, dataset, what="repository")
    return lambda entry: entry.repository in repositories


def _created_between(
    entries: Sequence[TaskEntry], since: datetime | None, until: datetime | None, dataset: str
) -> Condition:
    if undated := [entry.name for entry in entries if entry.created_at is None]:
        raise OptionInvalid(
            f"dataset {dataset!r}: expected a date (created_at) of every task; found none of {len(undated)},"
            f" such as {undated[0]}"
        )
    begin = since or datetime.min.replace(tzinfo=UTC)
    end = until or datetime.max.replace(tzinfo=UTC)
    return lambda entry: entry.created_at is not None and begin <= entry.created_at < end


def _matching(patterns: Sequence[str], names: set[str], dataset: str, *, what: str = "task") -> set[str]:
    """Returns the names that match a pattern (`*`, `?`, `[…]`) or equal it. Raises: OptionInvalid: none matches."""
    matches: set[str] = set()
    for pattern in patterns:
        fitting = {pattern} & names or {name for name in names if fnmatchcase(name, pattern)}
        if not fitting:
            raise OptionInvalid(
                f"dataset {dataset!r} has no {what} {pattern!r}; it has {', '.join(sorted(names)[:20])}"
            )
        matches |= fitting
    return matches


@dataclass(slots=True)
class Pool:
    """Several datasets as one. A name that several have gets its dataset's name as prefix in each of them."""

    datasets: Sequence[OpenedDataset]
    own: Sequence[Selection | None] = ()  # of each dataset, applied before pooling; empty: all tasks of all

    @property
    def name(self) -> str:
        """Name of the pool: `swe-gym` or `swe-gym+swe-rebench`."""
        return "+".join(dict.fromkeys(dataset.name for dataset in self.datasets))

    def entries(self) -> list[TaskEntry]:
        """Returns all entries with their names in the pool.

        Raises: as `OpenedDataset.entries`; DatasetInvalid: a name occurs twice, even with the dataset's name; as
            `choose`, for a dataset with its own selection.
        """
        shared = self._shared()
        entries = [
            replace(entry, name=_unique(dataset, entry.name, shared))
            for dataset, own in zip_longest(self.datasets, self.own)
            for entry in (choose(dataset.entries(), own, dataset.name) if own else dataset.entries())
        ]
        seen: set[str] = set()
        for entry in entries:
            if not _NAME.fullmatch(entry.name):
                raise DatasetInvalid(
                    f"datasets {self.name}: expected names that become a task's with the dataset's before them: at most"
                    f" 200 letters, digits and ._/+-; found {entry.name[:250]!r}; give the dataset's file another name"
                )
            if entry.name in seen:
                raise DatasetInvalid(
                    f"datasets {self.name}: expected one task of each name; found {entry.name!r} twice"
                )
            seen.add(entry.name)
        return entries

    def tasks(self, chosen: Sequence[TaskEntry]) -> Iterator[AgentTask]:
        """Yields the chosen tasks in the pool's order, with their names in it. Raises: as `OpenedDataset.tasks`."""
        shared, names = self._shared(), {entry.name for entry in chosen}
        for dataset in self.datasets:
            own = {e.name for e in dataset.entries() if _unique(dataset, e.name, shared) in names}
            for task in dataset.tasks(own) if own else ():
                name = _unique(dataset, task.name, shared)
                yield task if name == task.name else _renamed(task, name)

    def _shared(self) -> set[str]:
        seen: set[str] = set()
        shared: set[str] = set()
        for dataset in self.datasets if len(self.datasets) > 1 else ():
            names = {entry.name for entry in dataset.entries()}
            shared |= seen & names
            seen |= names
        return shared


def _unique(dataset: OpenedDataset, name: str, shared: set[str]) -> str:
    return f"{dataset.name}/{name}" if name in shared else name


def _renamed(task: AgentTask, name: str) -> AgentTask:
    return AgentTask.model_validate({**dict(task), "name": name})
