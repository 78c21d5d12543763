"""Watching what environments write: each by itself, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from app.environments.disk_watch import DiskWatch
from app.errors import EngineUnavailable, EnvironmentFailed, EnvironmentOverLimit, HostDiskFull


class Writer:
    def __init__(self, name: str, size: Callable[[], int | None]) -> None:
        self.id = name
        self.written_bytes = size
        self.ended: type[EnvironmentFailed] | None = None

    @property
    def gone(self) -> bool:
        return self.ended is not None

    def fail(self, why: str, *, kind: type[EnvironmentFailed]) -> None:
        self.ended = kind


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskWatch:
    monkeypatch.setattr("app.environments.disk_watch._LOOK_S", 60.0)  # we look ourselves
    return DiskWatch(tmp_path, tmp_path / "turn", dict)


@pytest.mark.parametrize("error", [EngineUnavailable("away"), OSError("gone"), TimeoutExpired("du", 1.0)])
def test_one_that_cannot_be_measured_keeps_nobody_from_looking_at_the_others(
    watch: DiskWatch, error: Exception
) -> None:
    def fails() -> int:
        raise error

    broken, greedy = Writer("broken", fails), Writer("greedy", lambda: 101)
    watch.watch(broken, 100)
    watch.watch(greedy, 100)
    watch.look()
    assert (broken.ended, greedy.ended) == (None, EnvironmentOverLimit)


def test_what_was_forgotten_is_not_ended(watch: DiskWatch) -> None:
    whole, part = Writer("whole", lambda: 10), Writer("part", lambda: 101)
    watch.watch(whole, 100)
    watch.watch(part, 100)
    watch.forget(part)
    watch.forget(part)
    watch.look()
    assert (whole.ended, part.ended) == (None, None)


def test_the_largest_on_a_full_disk_is_not_ended_as_one_that_took_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.environments.disk_watch._LOOK_S", 60.0)
    monkeypatch.setattr("app.environments.disk_watch._RESERVE", 2.0)  # every disk is nearly full
    small, large = Writer("small", lambda: 10), Writer("large", lambda: 20)
    watch = DiskWatch(tmp_path, tmp_path / "turn", lambda: {"small": 50 << 20, "large": 60 << 20})
    watch.watch(small, 100)
    watch.watch(large, 100)
    watch.look()
    assert (small.ended, large.ended) == (None, HostDiskFull)
