"""What counts in which phase of an environment's times."""

from __future__ import annotations

import time

import pytest

from app.environments.contract import Times, noting
from app.images.pull_source import PullSource, noted, tell


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `time.monotonic` says."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_was_measured_is_noted_whichever_it_was_of_and_no_second_twice(clock: list[float]) -> None:
    outer, inner = Times(), Times()

    def fails() -> None:
        with outer.measure("set_up"):
            clock[0] += 1
            with inner.measure("create"):
                clock[0] += 2
            clock[0] += 4
            raise OSError("no")

    with noting() as noted:
        with noted.measure("image"):
            clock[0] += 8
        with pytest.raises(OSError, match="no"):
            fails()
    assert noted.phases == {"image": 8.0, "create": 2.0, "set_up": 5.0}
    assert outer.phases == {"set_up": 7.0}
    with outer.measure("session"):
        clock[0] += 1
    assert "session" not in noted.phases


def test_a_reset_one_begins_anew_when_it_is_handed_on_and_one_that_is_in_use_does_not(clock: list[float]) -> None:
    used, in_use = Times(phases={"reset": 3.0, "start": 1.0}), Times(phases={"create": 3.0})
    for times in (used, in_use):
        with times.handed_on():
            clock[0] += 2
    assert used.phases == {"hand_out": 2.0}
    assert in_use.phases == {"create": 3.0}


def test_the_longest_way_of_an_image_is_told_to_whoever_asked_for_it() -> None:
    with noted() as nothing:
        pass
    with noted() as both:
        tell(PullSource.BUILD)
        with noted() as inner:
            tell(PullSource.PULL)
    tell(PullSource.BUILD)
    assert (nothing.longest, inner.longest, both.longest) == (PullSource.HERE, PullSource.PULL, PullSource.BUILD)
