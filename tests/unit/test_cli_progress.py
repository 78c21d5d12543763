"""What is shown of a run that is watched: each task is counted once."""

from __future__ import annotations

from app.cli.progress import lines
from app.ledger.results import Progress


def test_tasks_that_have_not_ended_are_told_apart() -> None:
    now = Progress(14, 4, 7, 0, 0, 0, 0, 0, None, running={"image": 1, "agent": 2})
    assert lines(now, 5.0)[1] == "4 wait for a slot, 7 have one and wait for a worker, 3 run (image 1, agent 2)"
    assert lines(Progress(2, 2, 0, 0, 0, 0, 0, 0, None), 5.0)[1].endswith("0 have one and wait for a worker, 0 run")
