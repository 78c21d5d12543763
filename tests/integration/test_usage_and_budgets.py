"""What was used, added up in every way, and budgets of runs, against a real PostgreSQL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args
from uuid import UUID

import pytest
from sqlalchemy import text

from app.errors import SpecInvalid, UnknownName
from app.evaluation.report import slice_of
from app.ledger import pauses, report_rows, results
from app.ledger.accept import NewRun, accept
from app.ledger.database import Database
from app.ledger.model_usage import UsageRow, usage
from app.models.endings import EndReason
from app.models.kinds import UsageBy as By
from app.settings import Settings
from tests.building import a_spec, new_id
from tests.integration.command import CommandLine
from tests.integration.rows import a_call, a_run, a_task, ago, an_attempt, insert, one, paused

TOKENS = {"prompt_tokens": 1000, "completion_tokens": 10, "cached_tokens": 400}
USED: dict[str, Any] = {"duration_s": 2.0, "waited": {"model": 0.5}, **TOKENS}


@pytest.fixture
def used(database: Database) -> UUID:
    """Two tasks of a run: one with priced calls, one of an unknown price; and a task that called no model."""
    run = a_run(database, name="night", total=3)
    phases = {"image_ready": ago(100).isoformat(), "stored": ago(40).isoformat()}
    for name, agent, cost in (("cheap", "mini-swe-agent", 0.5), ("dear", "claude-code", None), ("plain", "oracle", 0)):
        task = a_task(database, run, name=name, agent=agent, state="succeeded", in_line=False)
        attempt = an_attempt(database, task, state="finished", claimed_at=ago(101), finished_at=ago(39), phases=phases)
        whose: dict[str, Any] = {"run_id": run, "task_id": task, "attempt_id": attempt, "model": f"of-{agent}"}
        for _ in range(0 if agent == "oracle" else 2):
            a_call(database, cost_usd=cost, started_at=ago(50), **whose, **USED)
    return run


def _rows(database: Database, by: By, **given: Any) -> list[UsageRow]:
    with database.begin() as connection:
        return usage(connection, by, **given)


def test_by_task(database: Database, used: UUID) -> None:
    cheap, dear, plain = _rows(database, "task", run_id=used)
    assert (cheap.key, cheap.calls, cheap.turns) == ("cheap #0", 2, 2)
    assert (cheap.prompt_tokens, cheap.cached_tokens) == (2000, 800)
    assert (cheap.cost_usd, cheap.unpriced_calls, cheap.model_s, cheap.waited_s) == (1.0, 0, 3.0, 1.0)
    assert (dear.key, dear.cost_usd, dear.unpriced_calls) == ("dear #0", None, 2)
    assert (plain.key, plain.calls, plain.attempts, plain.environment_s) == ("plain #0", 0, 1, 60.0)


def test_a_verifiers_time_costs_what_its_place_costs(
    database: Database, used: UUID, settings: Settings, tmp_path: Path, megaflow: CommandLine
) -> None:
    """Where the attempt ran, but for one that a grader of its own has graded."""
    here, grader = new_id(), new_id()
    for name, instance, slots in (("here", here, 1), ("there", grader, 4)):
        values = {"provider": name, "resource_class": "standard", "mode": "grading", "slots": slots}
        insert(database, "instances", id=instance, **values)
    phases = {"agent_ended": ago(3700).isoformat(), "graded": ago(100).isoformat()}
    set_all = "UPDATE attempts a SET instance_id = :id, phases = phases || CAST(:phases AS jsonb)"
    with database.begin() as connection:
        connection.execute(text("UPDATE tasks SET attempts = 1"))
        connection.execute(text(set_all), {"id": here, "phases": json.dumps(phases)})
        set_one = (
            "UPDATE attempts a SET environment = jsonb_build_object('graded_on', CAST(:id AS text)),"
            " phases = phases || CAST(:phases AS jsonb) FROM tasks t WHERE t.id = a.task_id AND t.name = 'plain'"
        )
        began = json.dumps({"grading_started": ago(1900).isoformat()})
        connection.execute(text(set_one), {"id": str(grader), "phases": began})
    prices = tmp_path / "prices.yaml"
    prices.write_text("here: {types: {standard: 2.0}}\nthere: {types: {standard: 8.0}}\n")
    megaflow.use(settings.model_copy(update={"instance_prices": prices}))
    found = {row["key"]: row["grading_usd"] for row in megaflow.json("usage", "night")}
    assert found == pytest.approx({"cheap #0": 2.0, "dear #0": 2.0, "plain #0": 1.0})
    assert megaflow.json("usage", "--by", "run")[0]["grading_usd"] == pytest.approx(5.0)

    def reported() -> tuple[float | None, float | None]:
        rows = report_rows.rows(database, used, lambda provider, _: {"here": 2.0, "there": 8.0}[provider])
        part = slice_of("all", [row for row in rows if row.name == "plain"])
        return part.grading_s, part.grading_usd

    assert reported() == (pytest.approx(1800, abs=1), pytest.approx(1.0, abs=0.01))
    with database.begin() as connection:
        task = connection.execute(text("UPDATE tasks SET attempts = 2 WHERE name = 'plain' RETURNING id")).scalar_one()
    an_attempt(database, task, number=2, state="finished", instance_id=here, phases=phases)
    assert reported() == (pytest.approx(5400, abs=1), pytest.approx(3.0, abs=0.01)), "all attempts, not the last alone"


@pytest.mark.parametrize(
    ("by", "keys"),
    [
        ("run", ["night"]),
        ("user", ["alice"]),
        ("agent", ["mini-swe-agent", "claude-code", "oracle"]),
        ("model", ["of-mini-swe-agent", "of-claude-code"]),
    ],
)
def test_in_other_ways(database: Database, used: UUID, by: By, keys: list[str]) -> None:
    found = _rows(database, by)
    assert [row.key for row in found] == keys
    assert sum(row.calls for row in found) == 4
    if by == "model":
        assert {row.environment_s for row in found} == {None}
    else:
        assert sum(row.environment_s or 0 for row in found) == 180.0


def test_the_command_shows_unknown_as_unknown(used: UUID, megaflow: CommandLine) -> None:
    lines = megaflow("usage", "night").splitlines()
    assert any("cheap #0" in line and "$1.00" in line for line in lines)
    assert any("dear #0" in line and "unknown" in line for line in lines)
    assert any("plain #0" in line and "$" not in line and "unknown" not in line for line in lines)
    assert any("all" in line and "$1.00 + 2 unknown" in line for line in lines)


def test_the_command_as_json(used: UUID, megaflow: CommandLine) -> None:
    for by in get_args(By):
        found = megaflow.json("usage", "--by", by)
        assert sum(row["calls"] for row in found) == 4


def reasons(database: Database) -> dict[str, str]:
    return {row.name: row.reason for row in paused(database)}


def test_a_run_that_has_spent_its_budget_is_paused_once_and_says_why(database: Database) -> None:
    run_id, within, free = (a_run(database, budget_usd=b, name=n) for b, n in ((1.0, "a"), (9.0, "b"), (None, "c")))
    for run in (run_id, within, free):
        a_task(database, run)
        a_call(database, cost_usd=0.75, run_id=run)
        a_call(database, cost_usd=0.25, run_id=run)
        a_call(database, cost_usd=None, run_id=run)
    assert pauses.hold_spent(database) == [run_id]
    assert pauses.hold_spent(database) == []
    assert list(reasons(database)) == [str(run_id)]
    assert "$1" in reasons(database)[str(run_id)]
    assert one(database, "SELECT in_line FROM tasks WHERE run_id = :r", r=run_id).in_line is False


def test_more_money_lets_it_go_on_and_less_does_not(database: Database) -> None:
    run_id = a_run(database, budget_usd=1.0)
    a_task(database, run_id)
    a_call(database, cost_usd=1.5, run_id=run_id)
    pauses.hold_spent(database)
    assert pauses.set_budget(database, str(run_id), 1.25) == (run_id, 1.5)
    assert reasons(database)
    pauses.set_budget(database, str(run_id)[-12:], 2.0)
    assert not reasons(database)
    assert pauses.hold_spent(database) == []
    a_call(database, cost_usd=0.5, run_id=run_id)
    assert pauses.hold_spent(database) == [run_id]
    pauses.set_budget(database, str(run_id), None)
    assert not reasons(database)


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
