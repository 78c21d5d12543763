"""Pools in which most of what ran lately failed, as the dispatcher finds them."""

from __future__ import annotations

import pytest

from app.ledger import pressure
from app.ledger.database import Database
from tests.integration import rows
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance


def _ended(
    database: Database, *reasons: str, tasks: int | None = None, mode: str = "persistent", age: float = 1
) -> None:
    """Attempts on one instance that has ended since, one for each reason. tasks: how many they are of."""
    instance, run = an_instance(database, mode=mode, state="terminated"), a_run(database)
    ids = [a_task(database, run, mode=mode, state="failed", finished_at=ago(0)) for _ in range(tasks or len(reasons))]
    for number, reason in enumerate(reasons):
        state = "succeeded" if reason == "submitted" else "error"
        values = {"state": state, "end_reason": reason, "finished_at": ago(age), "instance_id": instance}
        an_attempt(database, ids[number % len(ids)], mode=mode, number=number + 1, **values)


def _failing(database: Database, *classes: str) -> frozenset[str]:
    with database.begin() as connection:
        return pressure.failing_pools(connection, classes or ("standard", "gpu"), 60.0)


@pytest.mark.parametrize("reason", ["infrastructure", "environment_error", "lost"])
def test_a_pool_fails_when_most_of_what_ended_there_failed(database: Database, reason: str) -> None:
    _ended(database, reason, reason, reason, "submitted", "submitted")
    assert _failing(database) == {"standard"}
    assert _failing(database, "gpu") == frozenset()


def test_few_faults_among_many_ends_are_no_failing_pool(database: Database) -> None:
    _ended(database, *["lost"] * 3, *["submitted"] * 3)
    assert not _failing(database)


def test_one_task_that_fails_again_and_again_says_nothing(database: Database) -> None:
    _ended(database, *["infrastructure"] * 6, tasks=2)
    assert not _failing(database)


@pytest.mark.parametrize(("mode", "age"), [("ephemeral", 1), ("persistent", 61)])
def test_other_modes_and_old_faults_do_not_count(database: Database, mode: str, age: float) -> None:
    _ended(database, *["infrastructure"] * 3, mode=mode, age=age)
    assert not _failing(database)


def test_what_ends_well_on_other_instances_of_the_pool_counts(database: Database) -> None:
    _ended(database, *["infrastructure"] * 3)
    instance, run = an_instance(database, mode="persistent", state="ready"), a_run(database)
    for _ in range(4):
        task = a_task(database, run, mode="persistent", state="succeeded", finished_at=ago(0))
        values = {"state": "succeeded", "end_reason": "submitted", "finished_at": ago(1), "instance_id": instance}
        an_attempt(database, task, mode="persistent", **values)
    assert not _failing(database)
    rows.write(
        database,
        "UPDATE attempts SET finished_at = finished_at - interval '2 minutes' WHERE instance_id = :i",
        i=instance,
    )
    assert _failing(database) == {"standard"}
