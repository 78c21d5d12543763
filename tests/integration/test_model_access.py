"""A worker's way to the gateway and the ledger when one of them is away, or when it is told to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import event

from app.agents.base import ModelEndpoint
from app.errors import ModelEndpointUnavailable
from app.ledger import model_calls
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.models.model_calls import Account, CallEnd
from app.workers import model_access
from app.workers.model_access import GatewayClient, ModelAccess
from tests.building import claimed
from tests.integration.http_server import Handler, served
from tests.integration.rows import a_call, insert, one

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = Database(database_url, pooled=False)
    yield found
    found.close()


def a_stored_call(database: Database, claim: Claim) -> None:
    known = {"attempt_id": claim.attempt_id, "task_id": claim.task_id, "run_id": claim.run_id}
    said = model_calls.packed({"role": "user", "content": "Hello"})
    insert(database, "model_messages", attempt_id=claim.attempt_id, digest="d1", body=said)
    body = model_calls.packed({"complete": True})
    a_call(database, cost_usd=None, messages=["d1"], body=body, dialect="chat/completions", **known)


def access(
    database: Database, claim: Claim, url: str = NOBODY, stopped: Callable[[], bool] = lambda: False
) -> ModelAccess:
    endpoint = ModelEndpoint(f"{url}/v1", "m", SecretStr("t1"))
    return ModelAccess(endpoint, claim, database, GatewayClient(url, "t1"), stopped, 30.0)


@contextmanager
def outage(database: Database) -> Iterator[list[str]]:
    """PostgreSQL takes no connection to this database until one was refused; yields what was refused."""
    refused: list[str] = []
    url = urlsplit(database.url)
    name = url.path.removeprefix("/")

    def allow(yes: bool) -> None:
        with psycopg.connect(database.url.replace(f"/{name}", "/postgres", 1), autocommit=True) as connection:
            connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS {yes}'.encode())

    def back(context: Any) -> None:
        refused.append(str(context.original_exception))
        allow(True)

    event.listen(database.engine, "handle_error", back)
    allow(False)
    try:
        yield refused
    finally:
        event.remove(database.engine, "handle_error", back)
        allow(True)


def test_calls_are_read_and_forgotten_through_a_moment_without_postgresql(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_access, "_SETTLE_S", 0.0)
    claim = claimed(database)
    a_stored_call(database, claim)
    found = access(database, claim)
    with outage(database) as refused:
        assert found.settle().turns == 1
    assert len(refused) == 1
    with outage(database) as refused:
        assert [call.messages for call in found.calls()] == [({"role": "user", "content": "Hello"},)]
    assert len(refused) == 1
    assert one(database, "SELECT count(*) FROM model_messages")[0] == 1
    with outage(database) as refused:
        found.forget()
    assert len(refused) == 1
    assert one(database, "SELECT count(*) FROM model_messages")[0] == 0


class Gateway:
    """An HTTP server that says one after the other what a test wrote down: status and body."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.url = ""


@contextmanager
def a_gateway(*says: tuple[int, str]) -> Iterator[Gateway]:
    gateway, left = Gateway(), list(says)

    class Says(Handler):
        def respond(self) -> None:
            gateway.asked.append(self.path)
            status, body = left.pop(0) if left else (503, "{}")
            self.answer(status, body.encode())

    with served(Says) as address:
        gateway.url = f"http://{address}"
        yield gateway


def test_a_gateway_that_does_not_settle_is_doubted(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_access, "_SETTLE_S", 0.0)
    with a_gateway() as gateway:
        found = access(database, claimed(database), gateway.url)
        assert found.settle() == Account()
        assert "on record" in found.doubt


def test_a_gateway_that_was_away_at_the_end_is_doubted_though_it_came_back(database: Database) -> None:
    found = access(database, claimed(database))
    asked: list[bool] = []
    with a_gateway((200, '{"turns": 2, "last_end": "answered"}')) as gateway:
        away, back = found.client, GatewayClient(gateway.url, "t1")

        class Comes:
            """At the second try another answers."""

            away = True

            def close(self, **values: float) -> Account | None:
                asked.append(True)
                return (away if len(asked) == 1 else back).close(**values)

        found.client = Comes()  # type: ignore[assignment]
        assert found.settle() == Account(turns=2, last_end=CallEnd.ANSWERED)
    assert away.away
    assert not back.away
    assert "away" in found.doubt


def test_a_gateway_that_settles_is_not_doubted(database: Database) -> None:
    with a_gateway((503, "{}"), (200, '{"turns": 2, "stopped_by": "step_limit", "new": 1}')) as gateway:
        found = access(database, claimed(database), gateway.url)
        assert found.settle() == Account(turns=2, stopped_by=CallEnd.STEP_LIMIT)
        assert found.doubt == ""


@pytest.mark.parametrize("body", ['{"turns": "many"}', '{"waited_s": null}', '{"error": "x"}', "oh"])
def test_an_answer_that_is_no_account_is_none(body: str) -> None:
    status = 500 if "error" in body else 200
    with a_gateway((status, body), (status, body)) as gateway, GatewayClient(gateway.url, "t1") as client:
        assert client.close() is None
        with pytest.raises(ModelEndpointUnavailable):
            client.account()
        assert not client.away, "it answered"


def test_what_limits_took_is_remembered_while_the_gateway_cannot_tell(database: Database) -> None:
    with a_gateway((200, '{"waited_s": 7.5}'), (503, "{}"), (200, '{"waited_s": 3}'), (200, "[]")) as gateway:
        found = access(database, claimed(database), gateway.url)
        assert found.waited_s() == 7.5
        assert found.doubt == ""
        assert found.waited_s() == 7.5
        assert "could not tell" in found.doubt
        assert [found.waited_s(), found.waited_s()] == [7.5, 7.5]
