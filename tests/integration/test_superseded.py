"""Replicas that are no longer needed, against a real PostgreSQL: told at once, without a verdict, never tried again."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from app.cli import progress
from app.ledger import ends, gradings, replicas, results, tasks
from app.ledger.attempts import Claim, renew
from app.ledger.database import Database
from app.ledger.dropped import dropped
from app.ledger.model_usage import usage
from app.models.endings import EndReason
from app.models.instance import InstanceMode
from app.models.outcome import AgentResult, Verdict, WakeUpMessage
from tests.building import RETRY, accepted, claim_of, claimed, dispatched, ready_instance
from tests.integration.command import CommandLine
from tests.integration.rows import a_call, a_run, a_task, ago, an_attempt, every, facts, one, write

SUPERSEDED = EndReason.SUPERSEDED


def supersede(database: Database, *task_ids: UUID) -> list[UUID]:
    with database.begin() as connection:
        return tasks.end(connection, task_ids, SUPERSEDED)[0]


def stop(database: Database) -> replicas.NoticesDue:
    with database.begin() as connection:
        return replicas.stop_superseded(connection, 30, RETRY)


def told_ago(database: Database, claim: Claim, seconds: float, *, renewed: bool) -> None:
    write(database, "UPDATE tasks SET cancel_requested_at = :at WHERE id = :id", at=ago(seconds), id=claim.task_id)
    until = ago(-30) if renewed else ago(seconds - 25)
    write(database, "UPDATE leases SET expires_at = :until WHERE attempt_id = :id", until=until, id=claim.attempt_id)


def ended(database: Database, task_id: UUID) -> tuple[Any, ...]:
    return tuple(one(database, "SELECT state, end_reason, verdict FROM tasks WHERE id = :id", id=task_id))


def test_what_waits_ends_at_once(database: Database) -> None:
    (waiting,), admitted = accepted(database).task_ids, accepted(database)
    dispatched(database, admitted)
    assert supersede(database, waiting, *admitted.task_ids) == []
    for task_id in (waiting, *admitted.task_ids):
        assert ended(database, task_id) == ("cancelled", "superseded", None)
    attempt = one(database, "SELECT state, end_reason FROM attempts")
    assert tuple(attempt) == ("cancelled", "superseded")
    assert [kind for kind, _ in facts(database) if kind.startswith("task.")] == ["task.superseded"] * 2


def test_what_runs_hears_why_and_its_end_has_no_verdict_however_it_ends(database: Database) -> None:
    claim = claimed(database)
    assert supersede(database, claim.task_id) == [claim.attempt_id]
    assert renew(database, [claim.attempt_id], lease_s=30) == {claim.attempt_id: SUPERSEDED}
    ends.finish(database, claim, verdict=Verdict(reward=1.0, counts=True))
    assert ended(database, claim.task_id) == ("cancelled", "superseded", None)
    assert tuple(one(database, "SELECT state, verdict FROM attempts")) == ("cancelled", None)
    assert every(database, "SELECT 1 FROM leases") == []


def test_a_grading_that_waits_or_runs_ends_too(database: Database) -> None:
    waits, runs = claimed(database), claimed(database)
    for claim in (waits, runs):
        gradings.hand_over(database, claim, AgentResult(end_reason=EndReason.SUBMITTED))
    message = WakeUpMessage(attempt_id=runs.attempt_id, number=1)
    grading = gradings.claim(database, message, ready_instance(database, InstanceMode.GRADING), lease_s=30)
    assert grading is not None
    assert supersede(database, waits.task_id, runs.task_id) == [runs.attempt_id]
    assert ended(database, waits.task_id) == ("cancelled", "superseded", None)
    ends.finish(database, grading.claimed, verdict=Verdict(reward=1, counts=True))
    assert ended(database, runs.task_id) == ("cancelled", "superseded", None)
    assert every(database, "SELECT 1 FROM gradings") == []


def test_a_persons_cancel_before_it_stays_and_one_after_it_changes_nothing(database: Database) -> None:
    first, second = claimed(database), claimed(database)
    tasks.cancel(database, [first.task_id])
    supersede(database, first.task_id, second.task_id)
    tasks.cancel(database, [second.task_id])
    reasons = {row.id: row.cancel_reason for row in every(database, "SELECT id, cancel_reason FROM tasks")}
    assert reasons == {first.task_id: "cancelled", second.task_id: "superseded"}


def test_it_is_not_tried_again(database: Database) -> None:
    superseded, cancelled = (accepted(database).task_ids[0] for _ in range(2))
    supersede(database, superseded)
    tasks.cancel(database, [cancelled])
    assert tasks.retry(database, [superseded, cancelled]) == [cancelled]


def test_one_that_runs_on_is_told_every_time_and_taken_away_when_its_grace_is_over(database: Database) -> None:
    claim = claim_of(database, accepted(database))
    supersede(database, claim.task_id)
    for seconds in (0.0, replicas.SILENCE_S + 1):
        told_ago(database, claim, seconds, renewed=True)
        assert stop(database) == replicas.NoticesDue([claim.attempt_id], [])
        assert ended(database, claim.task_id)[0] == "running"
    told_ago(database, claim, replicas.GRACE_S + 1, renewed=True)
    assert stop(database) == replicas.NoticesDue([claim.attempt_id], [])
    assert ended(database, claim.task_id) == ("cancelled", "superseded", None)
    assert one(database, "SELECT state FROM attempts").state == "lost"
    assert stop(database) == replicas.NoticesDue([], [])


def test_one_whose_worker_is_silent_is_taken_away_sooner_and_its_instance_named(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replicas.SILENCE_S + 1 < 5
    monkeypatch.setattr(replicas, "SILENCE_S", 60)
    claim = claim_of(database, accepted(database))
    supersede(database, claim.task_id)
    told_ago(database, claim, 0, renewed=False)
    assert stop(database) == replicas.NoticesDue([claim.attempt_id], [])
    told_ago(database, claim, 61, renewed=False)
    assert stop(database) == replicas.NoticesDue([claim.attempt_id], [claim.instance_id])
    assert ended(database, claim.task_id) == ("cancelled", "superseded", None)


@pytest.fixture
def run_id(database: Database) -> UUID:
    """Two graded, one superseded after 40 tokens, one cancelled."""
    run_id = a_run(database, name="train", total=4)
    verdict = {"reward": 1.0, "counts": True}
    for state, reason in (("succeeded", "submitted"),) * 2 + (("cancelled", "superseded"), ("cancelled", "cancelled")):
        graded = {"verdict": verdict} if state == "succeeded" else {}
        task = a_task(database, run_id, state=state, end_reason=reason, **graded)
        attempt = an_attempt(database, task, state="finished" if graded else "cancelled")
        whose: dict[str, Any] = {"run_id": run_id, "task_id": task, "attempt_id": attempt}
        a_call(database, cost_usd=0.5, prompt_tokens=100, completion_tokens=40, cached_tokens=0, **whose)
    return run_id


def test_it_is_counted_apart_and_its_cost_is_waste(database: Database, run_id: UUID, megaflow: CommandLine) -> None:
    now = results.progress_of(database, [run_id])
    assert (now.ended, now.cancelled, now.superseded, now.scored, now.done) == (4, 1, 1, 2, True)
    assert "1 cancelled, 1 superseded" in progress.lines(now, 1.0)[0]
    status = results.run_status(database, run_id)
    assert (status.superseded, status.scored, status.mean_reward) == (1, 2, 1.0)
    with database.begin() as connection:
        (row,) = usage(connection, "run", run_id=run_id)
    assert (row.completion_tokens, row.waste_tokens, row.waste_usd) == (160, 40, 0.5)
    assert "1 not" not in megaflow("runs")
    assert "1 cancelled, 2 succeeded, 1 superseded" in megaflow("runs")
    assert "40, $0.5000" in megaflow("usage", "train")
    assert megaflow.json("status", "train")["runs"][0]["superseded"] == 1


def test_the_share_dropped_is_shown_by_length(database: Database, run_id: UUID, megaflow: CommandLine) -> None:
    write(database, "UPDATE tasks SET attempts = 1")
    long = a_task(database, run_id, state="cancelled", end_reason="superseded", attempts=1, added_for="hedge")
    whose: dict[str, Any] = {"run_id": run_id, "task_id": long, "attempt_id": an_attempt(database, long)}
    for tokens in (3000, 2000):
        a_call(database, cost_usd=0.25, completion_tokens=tokens, **whose)
    found = dropped(database, run_id)
    assert (found.superseded, found.tokens, found.waste_tokens, found.waste_usd) == (2, 5160, 5040, 1.0)
    assert [(one.below, one.ended, one.superseded) for one in found.by_length] == [(1024, 4, 1), (16384, 1, 1)]
    shown = megaflow("experience", "status", "train")
    assert "2 replicas superseded, 1 added for hedge" in shown
    assert "5,040 of 5,160 answer tokens, $1.0000" in shown
    assert "100 %" in shown
