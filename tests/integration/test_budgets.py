"""Budgets of runs, and what earlier attempts left, against a real PostgreSQL."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from app.errors import SpecInvalid, UnknownName
from app.ledger import pauses, results
from app.ledger.accept import NewRun, accept
from app.ledger.database import Database
from app.models.endings import EndReason
from tests.building import a_spec
from tests.integration.rows import a_call, a_run, a_task, an_attempt, insert, one


def paused(database: Database) -> dict[str, str]:
    return {str(row.run_id): row.reason for row in pauses.all_of(database)}


def test_a_run_that_has_spent_its_budget_is_paused_once_and_says_why(database: Database) -> None:
    run_id, within, free = (a_run(database, budget_usd=b, name=n) for b, n in ((1.0, "a"), (9.0, "b"), (None, "c")))
    for run in (run_id, within, free):
        a_task(database, run)
        a_call(database, cost_usd=0.75, run_id=run)
        a_call(database, cost_usd=0.25, run_id=run)
        a_call(database, cost_usd=None, run_id=run)
    assert pauses.hold_spent(database) == [run_id]
    assert pauses.hold_spent(database) == []
    assert list(paused(database)) == [str(run_id)]
    assert "$1" in paused(database)[str(run_id)]
    assert one(database, "SELECT in_line FROM tasks WHERE run_id = :r", r=run_id).in_line is False


def test_a_run_that_has_nothing_waiting_is_left_alone(database: Database) -> None:
    run_id = a_run(database, budget_usd=1.0)
    a_task(database, run_id, state="succeeded")
    a_call(database, cost_usd=5.0, run_id=run_id)
    assert pauses.hold_spent(database) == []


def test_more_money_lets_it_go_on_and_less_does_not(database: Database) -> None:
    run_id = a_run(database, budget_usd=1.0)
    a_task(database, run_id)
    a_call(database, cost_usd=1.5, run_id=run_id)
    pauses.hold_spent(database)
    assert pauses.set_budget(database, str(run_id), 1.25) == (run_id, 1.5)
    assert paused(database)
    pauses.set_budget(database, str(run_id)[-12:], 2.0)
    assert not paused(database)
    assert pauses.hold_spent(database) == []
    a_call(database, cost_usd=0.5, run_id=run_id)
    assert pauses.hold_spent(database) == [run_id]
    pauses.set_budget(database, str(run_id), None)
    assert not paused(database)


def test_money_that_is_given_while_it_looks_leaves_the_run_as_it_is(database: Database) -> None:
    run_id = a_run(database, budget_usd=1.0)
    a_task(database, run_id)
    a_call(database, cost_usd=1.5, run_id=run_id)
    waiting = (
        "SELECT count(*) AS n FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    with ThreadPoolExecutor(1) as thread:
        with database.begin() as connection:
            connection.execute(text("UPDATE runs SET budget_usd = 9 WHERE id = :id"), {"id": run_id})
            held = thread.submit(pauses.hold_spent, database)
            while not held.done() and not one(database, waiting).n:
                time.sleep(0.01)
        assert held.result(30) == []
    assert not paused(database)


def test_a_pause_by_hand_is_not_lifted_by_money(database: Database) -> None:
    run_id = a_run(database, budget_usd=1.0)
    a_task(database, run_id)
    pauses.pause(database, str(run_id), "disk is full")
    pauses.set_budget(database, str(run_id), 5.0)
    assert paused(database) == {str(run_id): "disk is full"}


def test_impossible_budgets_and_unknown_runs_are_refused(database: Database) -> None:
    run_id = a_run(database)
    with pytest.raises(ValueError, match="more than 0"):
        pauses.set_budget(database, str(run_id), 0.0)
    with pytest.raises(UnknownName):
        pauses.set_budget(database, "nobody", 1.0)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(SpecInvalid, match="budget"):
            accept(database, NewRun([a_spec()], budget_usd=wrong))
    accepted = accept(database, NewRun([a_spec()], budget_usd=2.5))
    assert one(database, "SELECT budget_usd FROM runs WHERE id = :r", r=accepted.run_id).budget_usd == 2.5


def test_a_recording_is_of_the_same_replica_where_there_is_one(database: Database) -> None:
    run_id = a_run(database, total=2)
    for replica in (0, 1):
        task = a_task(database, run_id, replica=replica, attempts=1, state="succeeded")
        attempt = an_attempt(database, task, state="finished", end_reason="step_limit")
        insert(database, "artifacts", attempt_id=attempt, kind="trajectory", key=f"trajectory-{replica}")
    now = a_run(database, name="again", total=3)
    mine = [a_task(database, now, replica=replica) for replica in (0, 1, 2)]
    found = [results.trajectory_of(database, str(run_id), task, "fix-it") for task in mine]
    assert [one.key for one in found] == ["trajectory-0", "trajectory-1", "trajectory-0"]
    assert {one.end_reason for one in found} == {EndReason.STEP_LIMIT}
    with pytest.raises(SpecInvalid, match="found none"):
        results.trajectory_of(database, str(run_id), mine[0], "another")


def test_of_several_agents_one_has_to_be_named(database: Database) -> None:
    run_id = a_run(database, total=2)
    for agent in ("claude-code", "openhands"):
        task = a_task(database, run_id, agent=agent, attempts=1, state="succeeded")
        attempt = an_attempt(database, task, state="finished", end_reason="submitted")
        insert(database, "artifacts", attempt_id=attempt, kind="trajectory", key=f"of-{agent}")
    mine = a_task(database, a_run(database, name="again"))
    with pytest.raises(SpecInvalid, match="claude-code, openhands"):
        results.trajectory_of(database, str(run_id), mine, "fix-it")
    assert results.trajectory_of(database, f"{run_id}@openhands", mine, "fix-it").key == "of-openhands"
