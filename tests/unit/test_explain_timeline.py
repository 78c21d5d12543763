"""Where an attempt's time went: spans, windows and overlaps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ledger.timeline import NAMES, PHASES, AttemptTimes, LimitIntervals, WaitingWindow, spans, windows
from app.models.outcome import Phase

T0 = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def told(
    reached: dict[Phase, float], finished: float | None = None, now: float = 100.0
) -> list[tuple[str, float, bool]]:
    """Phase, seconds, over, for an attempt that was admitted at 0."""
    found = spans(
        {phase: at(s) for phase, s in reached.items()}, T0, None if finished is None else at(finished), at(now)
    )
    return [(span.phase, span.seconds, span.end is not None) for span in found]


def test_an_attempt_that_ended_well_has_a_span_for_every_phase() -> None:
    reached = {phase: float(n) for n, phase in enumerate(PHASES, start=1)}
    assert told(reached, finished=7.5) == [(name, 1.0, True) for name in PHASES.values()]
    assert ("queue", *PHASES.values()) == NAMES


def test_the_phase_in_which_an_attempt_failed_ends_with_it_and_is_not_taken_for_the_teardown() -> None:
    reached = {Phase.CLAIMED: 1.0, Phase.IMAGE_READY: 2.0, Phase.TORN_DOWN: 30.0}
    assert told(reached, finished=20) == [
        ("start", 1.0, True),
        ("image", 1.0, True),
        ("environment", 18.0, True),
        ("teardown", 10.0, True),
    ]
    del reached[Phase.TORN_DOWN]
    assert told(reached, finished=20)[-1] == ("environment", 18.0, True)


def test_a_task_waits_before_its_first_attempt_between_two_and_now() -> None:
    tries = [AttemptTimes(at(5), at(10)), AttemptTimes(at(12), at(20))]
    assert windows(T0, None, tries) == [
        WaitingWindow(T0, at(5), 1),
        WaitingWindow(at(10), at(12), 2),
        WaitingWindow(at(20), None, 3),
    ]
    assert windows(T0, at(20), tries) == [WaitingWindow(T0, at(5), 1), WaitingWindow(at(10), at(12), 2)]
    assert windows(T0, None, [AttemptTimes(at(5), None)]) == [WaitingWindow(T0, at(5), 1)]
    assert windows(T0, None, []) == [WaitingWindow(T0, None, 1)]
    assert WaitingWindow(T0, None, 1).seconds(at(3)) == 3.0


MOMENT = st.integers(0, 60)


@given(st.lists(st.tuples(MOMENT, MOMENT), max_size=8), MOMENT, MOMENT)
def test_binding_seconds_are_what_counting_second_by_second_gives(
    intervals: list[tuple[int, int]], one: int, two: int
) -> None:
    begin, end = sorted((one, two))
    expected = sum(any(a <= second < b for a, b in intervals) for second in range(begin, end))
    assert LimitIntervals([(at(a), at(b)) for a, b in intervals if a < b]).within(at(begin), at(end)) == pytest.approx(
        expected
    )
