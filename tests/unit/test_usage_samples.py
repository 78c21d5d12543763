"""Samples of memory and processors: bounded, of all environments in one thread, with marks of limits that were met."""

from __future__ import annotations

import time
from typing import cast

from app.environments.contract import Environment, GroupUsage
from app.workers.usage_samples import UsageSeries


class Using(Environment):
    """An environment by its counters."""

    def __init__(self, *, shown: bool = True) -> None:
        self.shown = shown
        self.memory_bytes, self.cpu_s, self.kills, self.held_up_s = 10 << 20, 1.0, 0, 0.0
        self.looks = 0

    def usage(self) -> GroupUsage | None:
        self.looks += 1
        return GroupUsage(self.memory_bytes, self.cpu_s) if self.shown else None

    def memory_kills(self) -> int | None:
        return self.kills

    def throttled_s(self) -> float | None:
        return self.held_up_s


def series_of(environment: Using, since: float | None = None) -> UsageSeries:
    series = UsageSeries(cast(Environment, environment), time.time() if since is None else since)
    assert series.begin()
    return series


def test_a_row_has_the_second_the_memory_and_the_processors() -> None:
    environment = Using()
    series = series_of(environment, since=time.time() - 42)
    series._at -= 5
    environment.memory_bytes, environment.cpu_s = 64 << 20, 8.5
    series.look()
    ((second, memory, cores),) = series.rows
    assert (second, memory) == (42, 64)
    assert cores is not None
    assert 1.4 < cores <= 1.5


def test_what_a_container_that_was_started_again_counts_is_not_below_nothing() -> None:
    environment = Using()
    series = series_of(environment)
    environment.cpu_s = 0.0
    series.look()
    assert series.rows[0][2] == 0.0


def test_limits_that_were_met_are_marked_when_it_was_seen() -> None:
    environment = Using()
    series = series_of(environment, since=time.time() - 10)
    series.look()
    environment.kills, environment.held_up_s = 2, 3.0
    series._at -= 5
    series.look()
    series.look()
    assert series.marks == [(10, "killed"), (10, "throttled")]
    assert series.describe()["marks"] == series.marks
