"""Defines the results of `megaflow explain` as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from app.ledger.limiting_factors import LimitingFactor
from app.ledger.waiting import QueueKey


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds spent in a phase or waiting for a limit."""

    name: str
    seconds: float


class LimitSpan(NamedTuple):
    """Interval in which a limit kept a task waiting."""

    limit: str
    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class PhaseStep:
    """Phase of an attempt, with the seconds that it waited for each limit. `end` is None while it lasts.

    limits: in the queue phase, the intervals of each limit.
    """

    phase: str
    begin: datetime
    end: datetime | None
    seconds: float
    waits: tuple[Share, ...] = ()
    limits: tuple[LimitSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptStory:
    """An attempt. `instance`: for display; `failure`: why another attempt had to follow."""

    number: int
    state: str
    mode: str
    end_reason: str | None
    instance: str | None
    failure: str | None
    steps: tuple[PhaseStep, ...]


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Position of a task in its queue, 1 is next."""

    position: int
    length: int


@dataclass(frozen=True, slots=True)
class CurrentState:
    """Current activity of a task that has not ended, or what it waits for."""

    doing: str  # one sentence
    since: datetime
    bounds: tuple[LimitingFactor, ...] = ()
    place: QueuePosition | None = None


@dataclass(frozen=True, slots=True)
class TaskStory:
    """Everything known about a task's time."""

    task_id: UUID
    run_id: UUID
    name: str
    user_name: str
    mode: str  # as requested
    resource_class: str
    state: str
    end_reason: str | None
    accepted_at: datetime
    finished_at: datetime | None
    seconds: float
    tries: tuple[AttemptStory, ...]
    now: CurrentState | None
    phases: tuple[Share, ...]  # over all attempts, in the order of phases
    waits: tuple[Share, ...]  # by limit, longest first


@dataclass(frozen=True, slots=True)
class Spread:
    """Durations of one phase over the attempts of a run."""

    phase: str
    count: int
    p50_s: float
    p90_s: float
    max_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class SlowTask:
    """A task among those that took longest from their acceptance."""

    task_id: UUID
    name: str
    state: str
    seconds: float
    longest_phase: str


@dataclass(frozen=True, slots=True)
class QueueNow:
    """A queue of a run's waiting tasks, and the limits that keep it waiting."""

    line: QueueKey
    waiting: int
    bounds: tuple[LimitingFactor, ...]


@dataclass(frozen=True, slots=True)
class RunStory:
    """Time spent by a run, and the limits of its waiting tasks."""

    run_id: UUID
    name: str
    user_name: str
    total: int
    states: dict[str, int]
    delayed: int  # retries that wait for their time
    phases: tuple[Spread, ...]
    waits: tuple[Share, ...]  # seconds of all tasks, by limit, longest first
    slowest: tuple[SlowTask, ...]
    retries: tuple[tuple[str, int], ...]  # end reason of attempts that were followed by another or by a failure
    now: tuple[QueueNow, ...]
    hint: str  # another important fact, e.g. that no dispatcher runs
    comes_after: str = ""  # tasks that all of its tasks wait for
