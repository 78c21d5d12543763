"""What the live display says of a moment, on 80 columns."""

from __future__ import annotations

import pytest

from app.cli.progress import lines
from app.cli.show import lasted
from app.ledger.results import Progress

HALF = Progress(
    total=30, waiting=6, starting=2, ended=12, failed=1, cancelled=0, scored=11, score=0.75,
    running={"image": 1, "agent": 6, "grading": 3},
)  # fmt: skip


def test_a_moment_is_two_lines_that_fit_a_terminal() -> None:
    first, second = lines(HALF, 41.0)
    assert first == "[########............] 12/30 done, score 0.75 of 11, 1 failed, 41s, about 1m02s left"
    assert second == "waiting 6, starting 2, running 10: image 1, agent 6, grading 3"


def test_the_time_left_goes_by_what_ended_while_we_looked() -> None:
    assert "about 1m30s left" in lines(HALF, 10.0, ended_before=10)[0]
    assert "left" not in lines(HALF, 10.0, ended_before=12)[0]


def test_the_end_is_one_line() -> None:
    done = Progress(total=3, waiting=0, starting=0, ended=3, failed=0, cancelled=1, scored=2, score=1.0)
    assert lines(done, 9.6) == ["[####################] 3/3 done, score 1.00 of 2, 1 cancelled, 9.60s"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0.40s"), (59.4, "59s"), (192, "3m12s"), (7500, "2h05m"), (266400, "3d02h"), (-1, "0.00s")],
)
def test_durations_are_short(seconds: float, said: str) -> None:
    assert lasted(seconds) == said
