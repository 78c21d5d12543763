"""Tokens of attempts against a real PostgreSQL: good for one attempt, while it is live, and nowhere to be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import text

from app.errors import StaleWriter
from app.ledger import attempts, ends, model_sessions
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.model_calls import ModelSession
from app.models.outcome import Verdict
from tests.building import claimed


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = Database(database_url)
    yield found
    found.close()


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
    assert found.limits.max_turns == claim.spec.task.limits.max_steps
    ends.finish(database, claim, end_reason=EndReason.SUBMITTED, verdict=Verdict(reward=1.0, counts=True), artifacts=[])
    ended = session(database, "mf-secret")
    assert ended is not None
    assert not ended.live


def test_nobody_elses_token_is_known(database: Database) -> None:
    model_sessions.open_session(database, claimed(database), "mf-secret")
    for wrong in ("mf-secre", "mf-secret ", "", model_sessions.digest_of("mf-secret")):
        assert session(database, wrong) is None


def test_the_token_itself_is_not_in_the_database(database: Database) -> None:
    model_sessions.open_session(database, claimed(database), "mf-secret")
    with database.begin() as connection:
        rows = connection.execute(text("SELECT * FROM model_sessions")).all()
    assert len(rows) == 1
    assert "mf-secret" not in str(rows)


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
