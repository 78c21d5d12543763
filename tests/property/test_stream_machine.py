"""The stream read by resuming readers while transactions open, wait, commit and roll back in any order.

Each task counts its facts in a row of its own, changed with the fact: the facts of a task that committed are numbered
1, 2, 3 … without a gap, in the order in which they happened. A reader that has everything, in order, sees just that.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from time import sleep
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from app.ledger import stream
from app.ledger.database import Database
from app.ledger.events import Fact, append

TASKS = [uuid4() for _ in range(3)]
WRITERS = 4
ROUNDS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = Database(database_url, pool_size=10)
    found.sql("CREATE TABLE counts (task_id uuid PRIMARY KEY, facts int NOT NULL DEFAULT 0)")
    yield found
    found.close()


def tell(connection: Connection, task_id: UUID) -> None:
    """One more fact of a task, as the ledger writes them: under the lock of the task's row."""
    number = connection.execute(
        text("UPDATE counts SET facts = facts + 1 WHERE task_id = :id RETURNING facts"), {"id": task_id}
    ).scalar_one()
    append(connection, Fact("task.counted", task_id=task_id, data={"number": number}))


def begin_anew(database: Database) -> None:
    with database.begin() as connection:
        connection.execute(text("TRUNCATE counts, events"))
        connection.execute(
            text("INSERT INTO counts (task_id) SELECT unnest(CAST(:ids AS uuid[]))"), {"ids": list(TASKS)}
        )


def counts(database: Database) -> dict[UUID, int]:
    return {row.task_id: row.facts for row in database.sql("SELECT task_id, facts FROM counts")}


class Reader:
    """Keeps what it was given, and every position with what it had then, to go back to."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.past: list[tuple[str, dict[UUID, int]]] = [(stream.START, {})]

    def take(self, limit: int) -> int:
        """Read on; how many came. Fails when one is missing, is there twice, or came too early."""
        position, seen = self.past[-1]
        page = stream.read(self.database, position, limit)
        for told in page.events:
            task_id, number = told.event.task_id or UUID(int=0), told.event.data["number"]
            expected = seen.get(task_id, 0) + 1
            assert number == expected, f"task {TASKS.index(task_id)}: expected fact {expected}, found {number}"
            seen = seen | {task_id: number}
            self.past.append((told.position, seen))
        self.past.append((page.position, seen))
        return len(page.events)

    def go_back(self, steps: int) -> None:
        del self.past[max(1, len(self.past) - steps) :]

    def catch_up(self) -> dict[UUID, int]:
        while self.take(7):
            pass
        return self.past[-1][1]


class World:
    """Four writers and a reader, one step at a time."""

    def __init__(self, database: Database, reader: Reader) -> None:
        begin_anew(database)
        self.database, self.reader = database, reader
        self.open: dict[int, tuple[ExitStack, Connection]] = {}
        self.locked: dict[UUID, int] = {}

    def write(self, writer: int, task: UUID, facts: int) -> None:
        """No fact: the transaction has its number long before it takes a row. Nothing where it would have to wait."""
        connection = self._connection(writer)
        connection.execute(text("SELECT pg_current_xact_id()"))
        if facts and self.locked.setdefault(task, writer) == writer:
            for _ in range(facts):
                tell(connection, task)

    def _connection(self, writer: int) -> Connection:
        if writer not in self.open:
            stack = ExitStack()
            self.open[writer] = stack, stack.enter_context(self.database.engine.connect())
        return self.open[writer][1]

    def end(self, writer: int, commits: bool) -> None:
        if writer in self.open:
            stack, connection = self.open.pop(writer)
            connection.commit() if commits else connection.rollback()
            stack.close()
            self.locked = {task: holder for task, holder in self.locked.items() if holder != writer}

    def read(self, limit: int) -> None:
        self.reader.take(limit)

    def resume(self, steps: int) -> None:
        self.reader.go_back(steps)

    def close(self) -> None:
        for writer in list(self.open):
            self.end(writer, True)


writer = st.integers(0, WRITERS - 1)
steps = st.one_of(
    st.tuples(st.just("write"), writer, st.sampled_from(TASKS), st.integers(0, 3)),
    st.tuples(st.just("write"), writer, st.sampled_from(TASKS), st.integers(0, 3)),
    st.tuples(st.just("end"), writer, st.sampled_from([True, True, False])),
    st.tuples(st.just("read"), st.integers(1, 5)),
    st.tuples(st.just("read"), st.integers(1, 5)),
    st.tuples(st.just("resume"), st.integers(1, 12)),
)


def test_a_reader_gets_every_committed_fact_once_and_in_order_whatever_the_transactions_do(database: Database) -> None:
    @ROUNDS
    @given(story=st.lists(steps, min_size=30, max_size=80))
    def play(story: list[tuple[str, Any]]) -> None:
        world = World(database, Reader(database))
        try:
            for verb, *how in story:
                getattr(world, verb)(*how)
            world.close()
            seen = world.reader.catch_up()
            assert {task: seen.get(task, 0) for task in TASKS} == counts(database), "not every fact came"
        finally:
            world.close()

    play()


def test_a_later_fact_of_a_transaction_with_a_lower_number_comes_later(database: Database) -> None:
    begin_anew(database)
    reader, task = Reader(database), TASKS[0]
    with database.engine.connect() as low, database.engine.connect() as still, database.engine.connect() as high:
        for connection in (low, still, high):
            connection.execute(text("SELECT pg_current_xact_id()"))
        for connection in (high, low):
            tell(connection, task)
            connection.commit()
        assert reader.catch_up() == {task: 2}, "they wait for no transaction that stays open"


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_readers_that_come_back_at_random_lose_nothing_beside_busy_writers(database: Database, seed: int) -> None:
    begin_anew(database)
    done, faults = threading.Event(), list[BaseException]()
    chance = random.Random(seed)
    seeds = (chance.random() for _ in count())
    writers = [threading.Thread(target=_write, args=(database.url, random.Random(next(seeds)))) for _ in range(8)]
    readers = [Reader(database) for _ in range(3)]
    reading = [
        threading.Thread(target=_read, args=(reader, random.Random(next(seeds)), done, faults)) for reader in readers
    ]
    for thread in (*writers, *reading):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in reading:
        thread.join()
    assert not faults, faults
    told = counts(database)
    assert sum(told.values()) > 100
    assert [reader.catch_up() for reader in readers] == [told] * 3


def _write(url: str, chance: random.Random) -> None:
    with Database(url, pool_size=1).engine.connect() as connection:
        for _ in range(30):
            if chance.random() < 0.5:
                connection.execute(text("SELECT pg_current_xact_id()"))
                sleep(chance.random() * 0.004)
            for task in sorted(chance.sample(TASKS, chance.randint(1, 2))):  # one order: no deadlock
                for _ in range(chance.randint(1, 3)):
                    tell(connection, task)
            sleep(chance.random() * 0.006)
            connection.rollback() if chance.random() < 0.2 else connection.commit()
    connection.engine.dispose()


def _read(reader: Reader, chance: random.Random, done: threading.Event, faults: list[BaseException]) -> None:
    try:
        while not done.is_set():
            reader.take(chance.randint(1, 40))
            if chance.random() < 0.05:
                reader.go_back(chance.randint(1, 200))
    except (AssertionError, psycopg.Error) as error:
        faults.append(error)
