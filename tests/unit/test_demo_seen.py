"""What the demo makes of its attempts' records: what it counts, and what it calls an error."""

from __future__ import annotations

from typing import Any

from app.cli import demo_seen
from app.cli.demo_seen import Asked, print_seen, seen_of, unexpected_paths
from app.environments.base import UNSEEN
from app.models.outcome import AttemptRecord, TaskResult
from app.models.spec import Mode
from app.models.states import AttemptState, TaskState
from tests.building import new_id

RUN, FRESH, SHARED = new_id(), new_id(), new_id()
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


def wrong(*found: TaskResult, ahead: bool = True) -> list[str]:
    """Also where one was lent."""
    lent = ended("cold", run=SHARED, shared=True)
    return unexpected_paths(seen_of([*found, lent]), Asked(FRESH, SHARED, ahead=ahead))


def test_a_run_that_shows_every_path_is_as_expected() -> None:
    assert wrong(ended("cold", reset=CLEAN), ended("recycled"), ended("warm", run=FRESH), ended("snapshot")) == []


def test_nothing_used_again_is_an_error() -> None:
    (line,) = wrong(ended("cold", reset=CLEAN), ended("warm"), ended("snapshot"))
    assert "used again after a reset" in line
    assert "2 cold, 1 warm" in line
    assert wrong(ended("cold"), ended("warm"), ended("snapshot")) != [], "no reset was even tried"
    assert wrong(ended("cold", reset={"clean": False, "left": ["/etc"]}), ended("warm"), ended("snapshot")) != []


def test_where_no_reset_can_be_proven_nothing_has_to_be_used_again() -> None:
    assert wrong(ended("cold", reset={"clean": False, "left": [UNSEEN]}), ended("snapshot"), ended("warm")) == []


def test_nothing_made_ahead_is_an_error_also_where_something_came_from_a_set_up() -> None:
    (line,) = wrong(ended("snapshot", reset=CLEAN), ended("recycled"))
    assert "made ahead" in line
    assert wrong(ended("snapshot", reset=CLEAN), ended("recycled"), ahead=False) == []


def test_nothing_made_from_a_set_up_is_an_error_also_where_something_was_made_ahead() -> None:
    (line,) = wrong(ended("warm", reset=CLEAN), ended("recycled"))
    assert "what a set-up left" in line


def test_nothing_lent_where_the_task_lets_others_in_is_an_error() -> None:
    found = [ended("cold", run=SHARED), ended("recycled"), ended("snapshot"), ended("warm", shared=True)]
    (line,) = unexpected_paths(seen_of(found), Asked(FRESH, SHARED, ahead=True))
    assert "`shared-readonly`" in line


def test_a_used_one_where_the_task_wants_none_is_an_error() -> None:
    (line,) = wrong(ended("recycled", run=FRESH), ended("warm"), ended("snapshot"))
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


def test_what_was_used_is_told_in_words_and_what_was_not_as_well() -> None:
    several = ended("cold", services=[{"name": "main"}, {"name": "shop"}])
    with demo_seen.console.capture() as caught:
        print_seen(seen_of([ended("warm"), ended("warm"), several, ended("cold", shared=True)]), ["a registry: [yes]"])
    said = caught.get().splitlines()
    assert said[-2] == (
        "environments made ahead: 2, made from what a set-up left: none, used again after a reset: none,"
        " lent read-only to several attempts: 1, of several containers: 1"
    )
    assert said[-1] == "a registry: [yes]"
