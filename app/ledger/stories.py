"""The results of `megaflow explain` as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from app.ledger.limiting_factors import LimitingFactor
from app.ledger.waiting import QueueKey


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds that something took."""

    name: str
    seconds: float


class LimitSpan(NamedTuple):
    """A time in which a limit kept a task waiting."""

    limit: str
    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class PhaseStep:
    """A phase of an attempt, with the seconds that it waited for each limit. `end` is None while it lasts.

    limits: of the queue, when it waited for which.
    """

    phase: str
    begin: datetime
    end: datetime | None
    seconds: float
    waits: tuple[Share, ...] = ()
    limits: tuple[LimitSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptStory:
    """An attempt. `instance` is a text for people; `failure` is the reason for the next attempt."""

    number: int
    state: str
    mode: str
    end_reason: str | None
    instance: str | None
    failure: str | None
    steps: tuple[PhaseStep, ...]


@dataclass(frozen=True, slots=True)
class OtherUser:
    """Another user with tasks in the same mode and class."""

    user_name: str
    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Position of a task in its queue (1 is next), and the other users of the same mode and class."""

    position: int
    length: int
    beside: tuple[OtherUser, ...]


@dataclass(frozen=True, slots=True)
class CurrentState:
    """Activity of a task that has not ended, or the reason for its wait."""

    doing: str  # one sentence
    since: datetime
    bounds: tuple[LimitingFactor, ...] = ()
    place: QueuePosition | None = None


@dataclass(frozen=True, slots=True)
class TaskStory:
    """Complete account of a task's time."""

    task_id: UUID
    run_id: UUID
    name: str
    user_name: str
    mode: str  # as asked for
    resource_class: str
    state: str
    end_reason: str | None
    accepted_at: datetime
    finished_at: datetime | None
    seconds: float
    tries: tuple[AttemptStory, ...]
    now: CurrentState | None
    phases: tuple[Share, ...]  # over all attempts, in the order of the way
    waits: tuple[Share, ...]  # by limit, longest first


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of one phase's duration over the attempts of a run."""

    phase: str
    count: int
    p50_s: float
    p90_s: float
    max_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class SlowTask:
    """A task among the slowest, measured from its acceptance."""

    task_id: UUID
    name: str
    state: str
    seconds: float
    longest_phase: str


@dataclass(frozen=True, slots=True)
class QueueNow:
    """A queue of a run's waiting tasks, and its limiting factors."""

    line: QueueKey
    waiting: int
    bounds: tuple[LimitingFactor, ...]


@dataclass(frozen=True, slots=True)
class RunStory:
    """Time use of a run, and the reason for the wait of its remaining tasks."""

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
    hint: str  # what else must be known, e.g. that nobody dispatches
    comes_after: str = ""  # what all of its tasks wait for, when those are tasks
