"""Computes where an attempt's time went from the times of its phases. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from app.models.outcome import Phase

LINE = "queue"
"""The phase before the admission."""
START = "start"
"""The phase between the admission and the claim."""

PHASES: Mapping[Phase, str] = {
    Phase.CLAIMED: START,
    Phase.IMAGE_READY: "image",
    Phase.ENVIRONMENT_READY: "environment",
    Phase.AGENT_STARTED: "set-up",
    Phase.AGENT_ENDED: "agent",
    Phase.GRADING_QUEUED: "hand-over",
    Phase.GRADING_STARTED: "grading queue",
    Phase.GRADED: "grading",
    Phase.STORED: "storing",
    Phase.TORN_DOWN: "teardown",
}
"""Phases after the admission, in order, by the mark that ends each."""

_ORDER = tuple(PHASES)
_IN_PLACE = tuple(phase for phase in PHASES if phase not in (Phase.GRADING_QUEUED, Phase.GRADING_STARTED))
"""Phases without those of an attempt that another instance grades."""

NAMES = (LINE, *PHASES.values())
"""Names of all phases, in order."""

_WAITED_IN: Mapping[str, str] = {
    "environment_starts": "environment",
    "image_pulls": "image",
    "image_builds": "image",
    "model": "agent",
}
"""Phase in which an attempt waits for a limit, by the prefix of the limit's name."""


def phase_of_limit(limit: str) -> str | None:
    """Returns the phase in which an attempt waits for this limit; None: unknown."""
    return next((phase for prefix, phase in _WAITED_IN.items() if limit.startswith(prefix)), None)


@dataclass(frozen=True, slots=True)
class Span:
    """Phase of an attempt. `end` is None while it lasts; `seconds`: its duration so far."""

    phase: str
    begin: datetime
    end: datetime | None
    seconds: float


def spans(
    reached: Mapping[Phase, datetime], admitted_at: datetime, finished_at: datetime | None, now: datetime
) -> list[Span]:
    """Returns the phases from the admission on.

    A failed attempt failed in the phase after the last one that it reached; that phase ends with the attempt.
    """
    phases: list[Span] = []
    order = _ORDER if Phase.GRADING_QUEUED in reached else _IN_PLACE
    begin, following = admitted_at, 0
    for index, phase in enumerate(order):
        if phase not in reached:
            continue
        if phase is Phase.TORN_DOWN and finished_at is not None and index > following:
            phases.append(_span(order[following], begin, finished_at))
            begin = max(begin, finished_at)
        phases.append(_span(phase, begin, reached[phase]))
        begin, following = reached[phase], index + 1
    if following < len(order):
        underway = order[following]
        if finished_at is None:
            phases.append(Span(PHASES[underway], begin, None, _between(begin, now)))
        elif underway is not Phase.TORN_DOWN:
            phases.append(_span(underway, begin, finished_at))
    return phases


def _span(phase: Phase, begin: datetime, end: datetime) -> Span:
    return Span(PHASES[phase], begin, end, _between(begin, end))


def _between(begin: datetime, end: datetime) -> float:
    return max(0.0, (end - begin).total_seconds())


class WaitingWindow(NamedTuple):
    """Interval in which a task waited for its admission. `end` is None while it waits."""

    begin: datetime
    end: datetime | None
    attempt: int  # number of the attempt that it waited for

    def seconds(self, now: datetime) -> float:
        return _between(self.begin, self.end or now)


class AttemptTimes(NamedTuple):
    """Times of an attempt's admission and end."""

    admitted_at: datetime
    finished_at: datetime | None


def windows(
    accepted_at: datetime,
    ended_at: datetime | None,
    attempts: Sequence[AttemptTimes],
    reopened: Iterable[datetime] = (),
) -> list[WaitingWindow]:
    """Returns the intervals in which a task waited: before its first attempt, between two, and now.

    attempts: in the order of their numbers. reopened: when `megaflow retry` put the task back in line; the time from an
    end until then is no waiting.
    """
    waits: list[WaitingWindow] = []
    begin: datetime | None = accepted_at
    moments = sorted(reopened)
    for number, attempt in enumerate(attempts, start=1):
        if begin is not None:
            again = [at for at in moments if begin < at <= attempt.admitted_at]
            waits.append(WaitingWindow(again[-1] if again else begin, attempt.admitted_at, number))
        begin = attempt.finished_at
    if begin is None:
        return waits
    if ended_at is None:
        again = [at for at in moments if at > begin]
        waits.append(WaitingWindow(again[-1] if again else begin, None, len(attempts) + 1))
    elif ended_at > begin and not attempts:  # it ended without an attempt
        waits.append(WaitingWindow(begin, ended_at, 1))
    return waits


class LimitIntervals:
    """Intervals in which one limit was binding; computes their share of a window quickly, for many windows."""

    def __init__(self, intervals: Iterable[tuple[datetime, datetime]]) -> None:
        """Merges intervals that touch or overlap, so that they count once."""
        self._begins: list[float] = []
        self._ends: list[float] = []
        for begin, end in sorted((begin.timestamp(), end.timestamp()) for begin, end in intervals):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            elif end > begin:
                self._begins.append(begin)
                self._ends.append(end)
        self._before = [0.0]  # seconds of all intervals before each
        for left, right in zip(self._begins, self._ends, strict=True):
            self._before.append(self._before[-1] + right - left)

    def during(self, begin: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Yields the parts of `begin` to `end` in which the limit was binding."""
        for left, right in zip(self._begins, self._ends, strict=True):
            since, until = max(left, begin.timestamp()), min(right, end.timestamp())
            if since < until:
                yield datetime.fromtimestamp(since, UTC), datetime.fromtimestamp(until, UTC)

    def within(self, begin: datetime, end: datetime) -> float:
        """Returns the seconds of `begin` to `end` in which the limit was binding."""
        return max(0.0, self._until(end.timestamp()) - self._until(begin.timestamp()))

    def _until(self, at: float) -> float:
        index = bisect_right(self._begins, at)
        if index == 0:
            return 0.0
        return self._before[index - 1] + min(at, self._ends[index - 1]) - self._begins[index - 1]
