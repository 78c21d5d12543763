"""The process that writes calls: whatever becomes of it, each call is in the ledger once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
from sqlalchemy import text

from app.errors import DatabaseUnavailable
from app.ledger.database import Database
from app.model_service.recording.process import StoreProcess
from app.model_service.recording.recorder import Recorder
from app.models.model_calls import ModelSession
from app.settings import Settings
from tests.building import a_session
from tests.integration.test_recording import an_exchange, calls_of


@asynccontextmanager
async def recording(database: Database, answer_s: float = 60.0) -> AsyncIterator[tuple[Recorder, StoreProcess]]:
    store = StoreProcess(database.url, answer_s=answer_s)
    recorder = Recorder(Settings(_env_file=None), database, store=store)
    try:
        yield recorder, store
    finally:
        await recorder.close()
        assert not psutil.pid_exists(store.pid), "it ends with the recorder"


async def _flush(recorder: Recorder, session: ModelSession) -> None:
    """As a gateway does for an attempt that ends: a fault is a reason to ask again."""
    while True:
        try:
            await recorder.flush(session.attempt_id)
            return
        except DatabaseUnavailable:
            await asyncio.sleep(0.05)


async def test_no_call_is_lost_or_kept_twice_when_the_process_is_killed_again_and_again(database: Database) -> None:
    chance = random.Random(1)
    sessions = [a_session() for _ in range(8)]
    exchanges = [an_exchange(sessions[number % 8], said=f"answer {number}") for number in range(400)]
    pids = set()

    async with recording(database) as (recorder, store):
        for number, exchange in enumerate(exchanges):
            recorder.record(exchange)
            if number % 100 == 50:
                pids.add(store.pid)
                os.kill(store.pid, signal.SIGKILL)
            await asyncio.sleep(chance.uniform(0.0, 0.01))
        for session in sessions:
            await _flush(recorder, session)
        pids.add(store.pid)

    assert len(pids) > 1
    kept = [call for session in sessions for call in calls_of(database, session)]
    assert Counter(call.id for call in kept) == Counter(exchange.id for exchange in exchanges)
    assert all(call.reply is not None and not call.lost for call in kept)


async def test_a_process_killed_in_the_middle_of_a_transaction_leaves_the_batch_to_the_next_one(
    database: Database,
) -> None:
    session = a_session()

    async with recording(database) as (recorder, store):
        recorder.record(an_exchange(session))
        await recorder.flush(session.attempt_id)
        with database.begin() as holding:
            holding.execute(text("LOCK TABLE model_calls IN EXCLUSIVE MODE"))
            recorder.record(an_exchange(session))
            while not _waits_for_a_lock(database):
                await asyncio.sleep(0.02)
            os.kill(store.pid, signal.SIGKILL)
        await _flush(recorder, session)

    assert len(calls_of(database, session)) == 2


def _waits_for_a_lock(database: Database) -> bool:
    query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'model_calls'::regclass"
    with database.begin() as connection:
        return bool(connection.execute(text(query)).scalar_one())


async def test_a_process_that_stands_still_is_replaced(database: Database) -> None:
    session = a_session()

    async with recording(database, answer_s=2.0) as (recorder, store):
        recorder.record(an_exchange(session))
        await _flush(recorder, session)
        stopped = store.pid
        os.kill(stopped, signal.SIGSTOP)
        recorder.record(an_exchange(session))
        await _flush(recorder, session)
        assert store.pid != stopped
        assert not psutil.pid_exists(stopped)

    assert len(calls_of(database, session)) == 2


async def test_closing_writes_what_is_left_also_through_a_process_that_has_just_died(database: Database) -> None:
    session = a_session()

    async with recording(database) as (recorder, store):
        recorder.record(an_exchange(session))
        await recorder.flush(session.attempt_id)
        os.kill(store.pid, signal.SIGTERM)  # it is the gateway that says when it is over
        for _ in range(300):
            recorder.record(an_exchange(session))
        os.kill(store.pid, signal.SIGKILL)

    assert len(calls_of(database, session)) == 301
