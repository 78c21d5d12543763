"""Recorded calls: what was said comes back, accounts agree with the ledger, and a ledger that is away costs nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import psycopg
import pytest
from sqlalchemy.exc import InternalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.errors import DatabaseUnavailable
from app.ledger import model_calls
from app.ledger.database import Database
from app.ledger.model_calls import StoredCall
from app.model_service.dialects import codec_for
from app.model_service.dialects.base import Reply, Request
from app.model_service.recording.recorder import Recorder
from app.models.model_calls import CallEnd, Dialect, Exchange, ModelSession, Sampled, TokenUse
from app.settings import Settings
from tests.building import a_session, new_id
from tests.dialect_requests import body_of
from tests.integration.rows import insert, one

TOOLS = ({"name": "bash", "description": "", "parameters": {"type": "object"}},)


_number = iter(range(10**9))


def an_exchange(
    session: ModelSession,
    *messages: dict[str, Any],
    said: str = "fine",
    dialect: Dialect = Dialect.CHAT,
    streamed: bool = False,
    tools: tuple[dict[str, Any], ...] = TOOLS,
    **values: Any,
) -> Exchange:
    codec = codec_for(dialect)
    asked = Request("m", messages or ({"role": "user", "content": "hello"},), tools, streamed, 100)
    reply = Reply({"role": "assistant", "content": said}, "stop", TokenUse(100, 10, 40), model="m")
    with_usage = replace(asked, parameters={"stream_options": {"include_usage": True}})
    whole = orjson.dumps(codec.whole(reply, id="a", request=asked))
    given = {
        "id": new_id(),
        "session": session,
        "dialect": dialect,
        "started_at": datetime.now(UTC) + timedelta(microseconds=next(_number)),
        "request": orjson.dumps(body_of(dialect, asked)),
        "response": b"".join(codec.events(reply, id="a", request=with_usage)) if streamed else whole,
        "streamed": streamed,
        "status": 200,
        "end": CallEnd.ANSWERED,
        "duration_s": 2.0,
        "waited_s": {"model": 0.5},
        "built_in": True,
    }
    return Exchange(**(given | values))


@asynccontextmanager
async def recording(database: Database, **values: Any) -> AsyncIterator[Recorder]:
    recorder = Recorder(Settings(_env_file=None, **values.pop("settings", {})), database, **values)
    try:
        yield recorder
    finally:
        await recorder.close()


def calls_of(database: Database, session: ModelSession) -> list[StoredCall]:
    with database.begin() as connection:
        return model_calls.calls_of(connection, session.attempt_id)


class Flaky(Database):
    """A database that may be away."""

    away = False
    fault: Exception | None = None

    @contextmanager
    def begin(self) -> Iterator[Any]:
        if self.away:
            raise DatabaseUnavailable("away")
        if self.fault is not None:
            raise self.fault
        with super().begin() as connection:
            yield connection


# --- What was said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_comes_back_as_it_was(database: Database, dialect: Dialect, streamed: bool) -> None:
    session = a_session()
    marks: dict[str, Any] = {"scripted": True, "sampled": Sampled({"temperature": 0.2}, ("seed",))}
    exchange = an_exchange(session, said="I looked.", dialect=dialect, streamed=streamed, **marks)

    async with recording(database) as recorder:
        assert recorder.record(exchange) == TokenUse(100, 10, 40, *_further(dialect))
        await recorder.flush(session.attempt_id)

    [found] = calls_of(database, session)
    assert found.messages == ({"role": "user", "content": "hello"},)
    assert (found.scripted, found.sampling) == (True, {"applied": {"temperature": 0.2}, "dropped": ["seed"]})
    assert found.reply == {"role": "assistant", "content": "I looked."}
    assert found.tools == TOOLS
    assert (found.dialect, found.streamed, found.max_tokens, found.lost) == (dialect, streamed, 100, "")
    assert found.cost_usd == 0
    assert found.complete


def _further(dialect: Dialect) -> tuple[int | None, ...]:
    """What a dialect tells beyond that: OpenAI's responses count thoughts, Anthropic's messages what was stored."""
    return {Dialect.CHAT: (), Dialect.RESPONSES: (0,), Dialect.MESSAGES: (None, 0)}[dialect]


async def test_each_message_of_an_attempt_is_kept_once(database: Database) -> None:
    session = a_session()
    said: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]

    async with recording(database) as recorder:
        for turn in range(20):
            recorder.record(an_exchange(session, *said, said=f"answer {turn}"))
            said.extend(
                [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"go on {turn}"}]
            )
            if turn % 7 == 0:
                await recorder.flush(session.attempt_id)
        await recorder.flush(session.attempt_id)

    found = calls_of(database, session)
    assert [len(call.messages) for call in found] == list(range(1, 41, 2))
    assert found[-1].messages == tuple(said[:-2])
    kept = one(database, "SELECT count(*) AS n FROM model_messages WHERE attempt_id = :a", a=session.attempt_id).n
    assert kept == 1 + 20 + 19 + 1  # the question, the answers, the goings on, the tools


async def test_what_cannot_be_read_is_kept_raw(database: Database) -> None:
    session = a_session()
    broken = an_exchange(session, request=b'{"model": "x", "messages": 3}', response=b"<html>no</html>")
    refused = an_exchange(session, response=b'{"error": {"message": "no"}}', end=CallEnd.UPSTREAM_ERROR, status=500)

    async with recording(database) as recorder:
        recorder.record(broken)
        recorder.record(refused)
        await recorder.flush(session.attempt_id)

    first, second = calls_of(database, session)
    assert first.raw == {"request": '{"model": "x", "messages": 3}', "response": "<html>no</html>"}
    assert second.raw == {"response": '{"error": {"message": "no"}}'}
    assert second.messages
    assert second.cost_usd == 0
    assert first.reply is second.reply is None


async def test_a_cut_answer_is_kept_as_far_as_it_came(database: Database) -> None:
    session = a_session()
    whole = an_exchange(session, said="one two three", streamed=True, end=CallEnd.CUT)
    cut = replace(whole, response=whole.response[: whole.response.index(b"three")])

    async with recording(database) as recorder:
        recorder.record(cut)
        await recorder.flush(session.attempt_id)

    [found] = calls_of(database, session)
    assert found.reply == {"role": "assistant", "content": "one two"}
    assert not found.complete
    assert not found.is_turn


# --- Accounts -------------------------------------------------------------------------------------------------------


async def test_prices_make_dollars_and_a_run_knows_what_it_spent(database: Database, tmp_path: Any) -> None:
    (tmp_path / "prices.yaml").write_text("m: {prompt: 10, completion: 100, cached: 1}")
    session = a_session()
    insert(database, "runs", id=session.run_id, name="n", user_name="a", purpose="evaluation", total=1, budget_usd=2.5)

    async with recording(database, settings={"model_prices": tmp_path / "prices.yaml"}) as recorder:
        await recorder.account(session)
        assert await recorder.run_spend(session) == (0.0, 2.5)
        recorder.record(an_exchange(session))
        account = await recorder.account(session)
        assert account.cost_usd == pytest.approx((60 * 10 + 40 * 1 + 10 * 100) / 1e6)
        spent, _ = await recorder.run_spend(session)
        assert spent == pytest.approx(account.cost_usd)

    with database.begin() as connection:
        assert model_calls.run_spend(connection, session.run_id)[0] == pytest.approx(0.00164)


# --- A ledger that is away ------------------------------------------------------------------------------------------


async def test_calls_are_kept_back_while_the_ledger_is_away(database_url: str) -> None:
    database = Flaky(database_url)
    session = a_session()

    async with recording(database) as recorder:
        await recorder.account(session)
        database.away = True
        for _ in range(5):
            recorder.record(an_exchange(session))
        with pytest.raises(DatabaseUnavailable):
            await recorder.flush(session.attempt_id)
        with pytest.raises(DatabaseUnavailable):
            await recorder.account(a_session())
        assert await recorder.run_spend(session) == (0.0, None)
        assert (await recorder.account(session)).calls == 5
        database.away = False
        await recorder.flush(session.attempt_id)

    assert len(calls_of(database, session)) == 5
    database.close()


@pytest.mark.parametrize(
    "fault",
    [
        PoolTimeout("QueuePool limit of size 8 overflow 5 reached"),
        InternalError("INSERT", {}, psycopg.errors.ReadOnlySqlTransaction("read-only")),
        ProgrammingError("INSERT", {}, psycopg.errors.UndefinedColumn("a migration is under way")),
        RuntimeError("something else"),
    ],
)
async def test_no_call_is_lost_to_a_ledger_that_cannot_take_any(database_url: str, fault: Exception) -> None:
    database = Flaky(database_url)
    session = a_session()

    async with recording(database) as recorder:
        await recorder.account(session)
        database.fault = fault
        recorder.record(an_exchange(session))
        with pytest.raises(DatabaseUnavailable):
            await recorder.flush(session.attempt_id)
        database.fault = None
        await recorder.flush(session.attempt_id)

    assert len(calls_of(database, session)) == 1
    database.close()


async def test_too_much_kept_back_lets_the_oldest_bodies_go_and_no_row(database_url: str) -> None:
    database = Flaky(database_url)
    session = a_session()
    exchanges = [an_exchange(session, {"role": "user", "content": "x" * 1000}) for _ in range(10)]

    async with recording(database, kept_bytes=4 * (len(exchanges[0].request) + len(exchanges[0].response))) as recorder:
        await recorder.account(session)
        database.away = True
        for exchange in exchanges:
            recorder.record(exchange)
        database.away = False
        await recorder.flush(session.attempt_id)

    found = calls_of(database, session)
    assert [bool(call.lost) for call in found] == [True] * 6 + [False] * 4
    assert all(call.use.prompt == 100 for call in found)
    database.close()


async def test_accounts_agree_with_the_ledger_and_survive_the_gateway(database: Database) -> None:
    session = a_session()

    async with recording(database) as recorder:
        assert (await recorder.account(session)).calls == 0
        for end in (CallEnd.ANSWERED, CallEnd.UPSTREAM_BUSY, CallEnd.ANSWERED, CallEnd.STEP_LIMIT):
            response = {} if end is CallEnd.ANSWERED else {"response": b"{}"}
            recorder.record(an_exchange(session, end=end, **response))
        await recorder.flush(session.attempt_id)
        account = await recorder.account(session)
        assert (account.calls, account.turns, account.prompt_tokens, account.cached_tokens) == (4, 2, 200, 80)
        assert (account.last_end, account.stopped_by) == (CallEnd.STEP_LIMIT, CallEnd.STEP_LIMIT)
        assert (account.model_s, account.waited_s) == (6.0, 2.0)
        assert (account.cost_usd, account.unpriced_calls) == (0.0, 0)
        with database.begin() as connection:
            assert model_calls.account_of(connection, session.attempt_id) == account

    async with recording(database) as recorder:
        recorder.record(an_exchange(session))  # before anybody asked
        account = await recorder.account(session)
        assert (account.calls, account.turns) == (5, 3)
        recorder.record(an_exchange(session, tools=()))
        assert (await recorder.account(session)).turns == 3


async def test_what_postgres_has_no_room_for_is_kept_all_the_same(database: Database) -> None:
    session = a_session()
    strange = an_exchange(session, {"role": "user", "content": "a\0b"}, said="c\0d", detail="e\0f \udc80")
    halves = replace(an_exchange(session), id=new_id(), request=strange.request.replace(b"a\\u0000b", b"\\ud83d \xff"))

    async with recording(database) as recorder:
        recorder.record(strange)
        recorder.record(halves)
        await recorder.flush(session.attempt_id)

    found, other = calls_of(database, session)
    assert found.messages[0]["content"] == "a\0b"
    assert found.reply == {"role": "assistant", "content": "c\0d"}
    assert found.detail == "e\ufffdf ?"
    assert other.messages[0]["content"].startswith("? ")
