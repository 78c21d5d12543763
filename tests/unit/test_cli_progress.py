"""What is shown of a run that is watched: each task is counted once."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from app.cli.progress import lines, submit_all
from app.errors import SpecInvalid
from app.ledger.results import Progress


def test_tasks_that_have_not_ended_are_told_apart() -> None:
    now = Progress(14, 4, 7, 0, 0, 0, 0, 0, None, running={"image": 1, "agent": 2})
    assert lines(now, 5.0)[1] == "4 queued, 7 starting, 3 running (image 1, agent 2)"
    assert lines(Progress(2, 2, 0, 0, 0, 0, 0, 0, None), 5.0)[1].endswith("0 starting, 0 running")


def test_the_times_and_what_was_not_scored_fit_into_80_columns() -> None:
    now = Progress(1000, 300, 100, 500, 40, 4, 2, 400, 0.5, running={"agent": 100})
    first = lines(now, 3900.0)[0]
    assert first.startswith("[##########..........] 500/1000 ended, 1h05m, about 1h05m left, score 0.50 of 400")
    assert "40 not scored" in first


def test_runs_before_one_that_is_refused_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    flow = Mock(submit=Mock(side_effect=[Mock(id="first"), SpecInvalid("no")]))
    with pytest.raises(SpecInvalid):
        submit_all(flow, [Mock(), Mock()])
    assert "megaflow cancel first" in capsys.readouterr().err
