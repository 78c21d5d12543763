"""Tokens of attempts against a real PostgreSQL: good for one attempt, while it is live, and nowhere to be read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from app.errors import StaleWriter
from app.ledger import attempts, ends, model_sessions
from app.ledger.database import Database
from app.models.model_calls import ModelSession
from app.models.outcome import Phase, Verdict
from tests.building import claimed
from tests.integration.rows import a_call, ago, one, write


def session(database: Database, token: str) -> ModelSession | None:
    with database.begin() as connection:
        return model_sessions.session_of(connection, token)


def test_a_token_stands_for_its_attempt_until_that_ends(database: Database) -> None:
    claim = claimed(database)
    model_sessions.open_session(database, claim, "mf-secret")
    found = session(database, "mf-secret")
    assert found is not None
    assert (found.attempt_id, found.number, found.task_id, found.run_id) == (
        claim.attempt_id, claim.number, claim.task_id, claim.run_id
    )  # fmt: skip
    assert found.live
    assert found.limits.max_steps == claim.spec.task.limits.max_steps
    ends.finish(database, claim, verdict=Verdict(reward=1.0, counts=True))
    ended = session(database, "mf-secret")
    assert ended is not None
    assert not ended.live


def test_the_token_itself_is_not_in_the_database(database: Database) -> None:
    model_sessions.open_session(database, claimed(database), "mf-secret")
    assert "mf-secret" not in str(one(database, "SELECT * FROM model_sessions"))


def test_a_second_opening_replaces_the_first_token(database: Database) -> None:
    claim = claimed(database)
    model_sessions.open_session(database, claim, "first")
    model_sessions.open_session(database, claim, "second")
    assert session(database, "first") is None
    assert session(database, "second") is not None


def test_an_attempt_that_is_not_ours_any_more_gets_no_token(database: Database) -> None:
    claim = claimed(database)
    with pytest.raises(StaleWriter):
        model_sessions.open_session(database, replace(claim, number=claim.number + 1), "mf-secret")
    assert session(database, "mf-secret") is None
    assert attempts.renew(database, [claim.attempt_id], lease_s=30) == {claim.attempt_id: None}


def _lost(database: Database, claim: attempts.Claim) -> None:
    lost = "UPDATE attempts SET state = 'lost', end_reason = 'lost', finished_at = :at WHERE id = :id"
    write(database, lost, id=claim.attempt_id, at=ago(60))


def _spent(database: Database) -> float:
    return float(one(database, "SELECT coalesce(sum(spent_usd), 0) FROM accounts")[0])


def test_calls_of_a_lost_attempt_are_charged_once_beside_what_was_known_of_it(database: Database) -> None:
    claim = claimed(database)
    model_sessions.open_session(database, claim, "mf-secret")
    attempts.record_phase(database, claim, Phase.AGENT_STARTED, cost_usd=0.25)
    for cost in (0.25, 0.5, None):
        a_call(database, cost_usd=cost, attempt_id=claim.attempt_id)
    assert model_sessions.settle_lost(database) == 0, "it runs"
    _lost(database, claim)
    assert model_sessions.settle_lost(database, after_s=3600) == 0, "its last calls may still be on their way"
    assert (model_sessions.settle_lost(database), _spent(database)) == (1, 0.75)
    assert (model_sessions.settle_lost(database), _spent(database)) == (0, 0.75)
    assert one(database, "SELECT cost_usd FROM attempts")[0] == 0.75


def test_two_who_settle_at_once_charge_once(database: Database) -> None:
    claims = [claimed(database) for _ in range(20)]
    for claim in claims:
        model_sessions.open_session(database, claim, f"mf-{claim.attempt_id}")
        a_call(database, cost_usd=1.0, attempt_id=claim.attempt_id)
        _lost(database, claim)
    with ThreadPoolExecutor(4) as threads:
        done = sum(threads.map(lambda _: model_sessions.settle_lost(database), range(4)))
    assert (done + model_sessions.settle_lost(database), _spent(database)) == (20, 20.0)
