"""Due times of schedules."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import SpecInvalid
from app.scheduling.calendar import Misfire, check_cron, due_times, to_fire

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
times = st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC))


def test_due_times_lie_after_the_first_and_up_to_the_second_moment() -> None:
    found = due_times("*/15 * * * *", NOON, NOON + timedelta(hours=1))
    assert [at.minute for at in found] == [15, 30, 45, 0]


@given(times, st.integers(1, 300), st.integers(1, 300))
def test_looking_twice_finds_what_looking_once_finds(start: datetime, first: int, second: int) -> None:
    middle, end = start + timedelta(minutes=first), start + timedelta(minutes=first + second)
    twice = due_times("*/7 * * * *", start, middle) + due_times("*/7 * * * *", middle, end)
    assert twice == due_times("*/7 * * * *", start, end)


@pytest.mark.parametrize(
    ("misfire", "late_s", "fired"),
    [(Misfire.SKIP, 5, 1), (Misfire.ONCE, 5, 1), (Misfire.SKIP, 3600, 0), (Misfire.ONCE, 3600, 1)],
)
def test_a_missed_time_follows_its_policy(misfire: Misfire, late_s: int, fired: int) -> None:
    due = [NOON - timedelta(hours=3), NOON]
    assert len(to_fire(due, misfire, NOON + timedelta(seconds=late_s), grace_s=15)) == fired


def test_only_the_latest_of_many_missed_times_is_made_up_for() -> None:
    due = [NOON + timedelta(minutes=n) for n in range(10)]
    assert to_fire(due, Misfire.ONCE, NOON + timedelta(hours=5), grace_s=15) == [due[-1]]


@pytest.mark.parametrize("cron", ["", "hello", "61 * * * *", "* * * *", "0 0 30 2 *"])
def test_a_bad_cron_line_is_refused_with_an_example(cron: str) -> None:
    with pytest.raises(SpecInvalid, match="expected"):
        check_cron(cron, NOON)
