"""A reward beyond all bounds: refused where it is read and where it is written, repaired where it stands."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from app.ledger import ends, results
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.outcome import Failure, TestStatus, Verdict
from tests.building import claimed

MIGRATION = Path(__file__).parents[2] / "migrations" / "versions" / "0009_bounded_rewards.py"


@pytest.mark.parametrize("reward", [1e300, -1e7, float("inf"), float("nan")])
def test_a_verdict_has_no_reward_beyond_the_bounds(reward: float) -> None:
    with pytest.raises(ValidationError):
        Verdict(reward=reward, counts=True)
    with pytest.raises(ValidationError):
        Verdict(reward=0.0, counts=True, metrics={"part": reward})


def test_what_the_database_cannot_hold_is_replaced_in_what_a_task_said(database: Database) -> None:
    said = "a\0b\ud800"
    claim = claimed(database)
    verdict = Verdict(reward=0.5, counts=True, detail=said, tests={said: TestStatus.PASSED}, metrics={said: 1.0})
    ends.finish(database, claim, end_reason=EndReason.SUBMITTED, verdict=verdict, artifacts=())
    (result,) = results.results(database, [claim.task_id])
    assert result.verdict is not None
    told = "a\N{REPLACEMENT CHARACTER}b?"
    assert (result.verdict.detail, list(result.verdict.tests), result.verdict.metrics) == (told, [told], {told: 1.0})
    assert Failure(error="GradingFailed", message=said).message == told


@pytest.mark.parametrize(("reward", "outside"), [(30.0, 1), (-0.5, 1), (1.0, 0), (0.0, 0)])
def test_a_reward_outside_0_to_1_is_counted_in_the_status(database: Database, reward: float, outside: int) -> None:
    claim = claimed(database)
    ends.finish(
        database, claim, end_reason=EndReason.SUBMITTED, verdict=Verdict(reward=reward, counts=True), artifacts=()
    )
    (status,) = results.runs(database)
    assert (status.mean_reward, status.rewards_outside) == (reward, outside)


def test_the_tables_refuse_it_and_the_migration_repairs_it(database: Database) -> None:
    claim = claimed(database)
    verdict = Verdict(reward=1.0, counts=True, detail="all passed")
    ends.finish(database, claim, end_reason=EndReason.SUBMITTED, verdict=verdict, artifacts=())
    wrong = {"v": json.dumps({"reward": 1e300, "counts": True, "detail": "claimed", "metrics": {"part": 1e300}})}
    for table in ("attempts", "tasks"):
        with pytest.raises(IntegrityError, match=f"{table}_reward_check"), database.begin() as connection:
            connection.execute(text(f"UPDATE {table} SET verdict = CAST(:v AS jsonb)"), wrong)
    repair = runpy.run_path(str(MIGRATION))["_REPAIR"]
    with database.begin() as connection:
        for table in ("attempts", "tasks"):
            connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {table}_reward_check"))
            connection.execute(text(f"UPDATE {table} SET verdict = CAST(:v AS jsonb)"), wrong)
            connection.exec_driver_sql(repair.format(table=table))
    (status,) = results.runs(database)
    assert (status.scored, status.resolved, status.mean_reward) == (0, 0, None)
    (result,) = results.results(database, [claim.task_id])
    assert result.verdict is not None
    assert (result.verdict.reward, result.verdict.counts, result.verdict.metrics) == (None, False, {})
    assert result.verdict.detail.startswith("not scored: the reward 1")
    assert result.verdict.detail.endswith("is not between -1e6 and 1e6; claimed")
