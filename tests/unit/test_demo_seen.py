"""What the demo makes of its attempts' records: what it counts, and what it calls an error."""

from __future__ import annotations

from typing import Any

import pytest

from app.cli import demo_seen
from app.cli.demo_seen import print_seen, seen_of, unexpected_paths
from app.environments.base import UNSEEN
from app.models.outcome import AttemptRecord, TaskResult
from app.models.spec import Mode
from app.models.states import AttemptState, TaskState
from tests.building import new_id

RUN, FRESH = new_id(), new_id()
CLEAN = {"clean": True, "left": []}


def ended(path: str, *, run: Any = RUN, reset: Any = None, grading: str | None = None, **told: Any) -> TaskResult:
    """A task whose one attempt has recorded this of its environments."""
    agent = {"path": path, "ready_s": 0.25, **told}
    teardown = {"agent": {**agent, "reset": reset}, "model_outlet": {"port": 1}}
    if grading is not None:
        teardown["grading"] = {"path": grading, "ready_s": 0.75, "reset": None}
    record = AttemptRecord(
        id=new_id(),
        number=1,
        state=AttemptState.FINISHED,
        mode=Mode.PERSISTENT,
        environment={**agent, "teardown": teardown},
    )
    task_id = new_id()
    state, mode = TaskState.SUCCEEDED, Mode.PERSISTENT
    return TaskResult(task_id=task_id, run_id=run, name="t", agent="nop", mode=mode, state=state, attempts=(record,))


def wrong(*found: TaskResult) -> list[str]:
    return unexpected_paths(seen_of(found), fresh=FRESH)


@pytest.mark.parametrize("path", ["warm", "snapshot"])
def test_a_run_that_shows_every_path_is_as_expected(path: str) -> None:
    assert wrong(ended("cold", reset=CLEAN), ended("recycled"), ended(path, run=FRESH)) == []


def test_nothing_used_again_is_an_error() -> None:
    (line,) = wrong(ended("cold", reset=CLEAN), ended("warm"))
    assert "used again after a reset" in line
    assert "1 cold, 1 warm" in line
    assert wrong(ended("cold"), ended("warm")) != [], "no reset was even tried"
    assert wrong(ended("cold", reset={"clean": False, "left": ["/etc"]}), ended("warm")) != []


def test_where_no_reset_can_be_proven_nothing_has_to_be_used_again() -> None:
    assert wrong(ended("cold", reset={"clean": False, "left": [UNSEEN]}), ended("snapshot")) == []


def test_nothing_made_ahead_or_from_a_set_up_is_an_error() -> None:
    (line,) = wrong(ended("cold", reset=CLEAN), ended("recycled"))
    assert "made ahead" in line


def test_a_used_one_where_the_task_wants_none_is_an_error() -> None:
    (line,) = wrong(ended("recycled", run=FRESH), ended("warm"))
    assert "`fresh`" in line


def test_environments_of_agents_and_of_gradings_are_counted_with_what_they_made_wait() -> None:
    found = [ended("cold", grading="warm", reset=CLEAN, network="model-only"), ended("cold", ready_s=0.5)]
    without = found[0].model_copy(update={"attempts": ()})
    assert [one.path for one in seen_of([*found, without])] == ["cold", "warm", "cold"]
    with demo_seen.console.capture() as caught:
        print_seen(seen_of(found))
    rows = [line.split() for line in caught.get().replace("│", " ").splitlines()]
    assert ["cold", "2", "375"] in rows
    assert ["warm", "1", "750"] in rows
    assert "2 model-only, 1 none; 1 of 1 that were reset were proven clean" in caught.get()
