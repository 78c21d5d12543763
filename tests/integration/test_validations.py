"""The table of validations in a real database: what it keeps, what a submission refuses, what a run's images are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.client import MegaFlow
from app.errors import SpecInvalid
from app.ledger import report_rows, validations
from app.models.spec import AgentTask
from app.models.validation import Validation, ValidationState, content_of
from app.settings import Settings
from tests.building import a_task
from tests.integration.rows import an_attempt, write


@pytest.fixture
def flow(settings: Settings) -> Iterator[MegaFlow]:
    with MegaFlow(settings) as opened:
        yield opened


def known(task: AgentTask, state: ValidationState, image_id: str = "sha256:1", reason: str = "") -> Validation:
    return Validation(
        content=content_of(task.model_dump(mode="json")),
        image_id=image_id,
        dataset=task.dataset,
        task=task.name,
        image=task.environment.label,
        state=state,
        reason=reason,
        rewards={"oracle": (1.0, None)},
        flipped=("t::a",),
    )


def test_a_validation_is_read_as_it_was_written_and_an_image_replaces_the_candidate(flow: MegaFlow) -> None:
    task, database = a_task(), flow.database
    validations.record(database, [known(task, ValidationState.CANDIDATE, image_id="")])
    validations.record(database, [known(task, ValidationState.BUILT)])
    validations.record(database, [whole := known(task, ValidationState.VALID)])
    with database.begin() as connection:
        assert validations.of_names(connection, [task.name]) == [whole]


def test_a_quarantined_task_is_refused_by_name_unless_asked_for_or_done_by_a_validator(flow: MegaFlow) -> None:
    task = a_task()
    validations.record(flow.database, [known(task, ValidationState.QUARANTINED, reason="nop 1")])
    with pytest.raises(SpecInvalid, match=rf"found 1: {task.name} \(nop 1\).*--include-quarantined"):
        flow.enqueue(task, agent="mini-swe-agent", model="replay")
    with pytest.raises(SpecInvalid, match="found 1: own/"):  # as a pool of several datasets names it
        flow.enqueue(task.model_copy(update={"name": f"own/{task.name}"}), agent="mini-swe-agent", model="replay")
    flow.enqueue(task, agent="mini-swe-agent", model="replay", include_quarantined=True)
    for agent in ("nop", "cheat"):
        flow.enqueue(task, agent=agent)


def test_a_task_that_was_repaired_or_validated_again_is_not_refused(flow: MegaFlow) -> None:
    task = a_task()
    validations.record(flow.database, [known(task, ValidationState.QUARANTINED, reason="nop 1")])
    goal = task.goal.model_copy(update={"command": "another"})
    flow.enqueue(task.model_copy(update={"goal": goal}), agent="mini-swe-agent", model="replay")
    validations.record(flow.database, [known(task, ValidationState.VALID)])
    flow.enqueue(task, agent="mini-swe-agent", model="replay")


def test_a_run_knows_which_of_its_tasks_ran_on_the_very_image_that_was_validated(flow: MegaFlow) -> None:
    task = a_task()
    validations.record(flow.database, [known(task, ValidationState.VALID)])
    run = flow.enqueue_many([task], agent="mini-swe-agent", model="replay", replicas=2)
    for handle, image in zip(run.handles, ("sha256:1", "sha256:other"), strict=True):
        an_attempt(flow.database, handle.task_id, user="default", environment={"image_id": image})
        write(flow.database, "UPDATE tasks SET attempts = 1 WHERE id = :task", task=handle.task_id)
    expected = validations.ImageState(ValidationState.VALID, ("t::a",))
    assert validations.states_of_run(flow.database, run.id) == {run.handles[0].task_id: expected}
    rows = report_rows.rows(flow.database, run.id)
    assert [(row.validation, row.flipped) for row in rows] == [(ValidationState.VALID, ("t::a",)), (None, ())]
