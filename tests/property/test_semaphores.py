"""Semaphores as Hypothesis state machines, beside a model of a few lines: the ledger's on a real PostgreSQL, that of
model calls on a real Redis.

A crash is a holder that stops renewing: its lease is put into the past. The models are exact, so every answer and every
row is compared: who is in, who waits, in which order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import ClassVar
from uuid import UUID

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from app.ledger import limits, semaphores
from app.ledger.database import Database
from app.model_service import limiter_scripts as scripts

NAMES = ("image_builds:a", "image_builds:b")
HOLDERS = [UUID(int=n) for n in range(1, 8)]
DEFAULT = 2


@dataclass
class Row:
    """One holder in the model."""

    holder: UUID
    granted: bool = False
    lapsed: bool = False


@dataclass
class Line:
    """One limit in the model: its rows in the order in which they came."""

    rows: list[Row] = field(default_factory=list)

    def of(self, holder: UUID) -> Row | None:
        return next((row for row in self.rows if row.holder == holder), None)

    def used(self) -> int:
        return sum(row.granted for row in self.rows)

    def ahead(self, row: Row) -> int:
        return sum(not other.granted for other in self.rows[: self.rows.index(row)])


class LedgerSemaphores(RuleBasedStateMachine):
    """Askers, renewals, releases, crashes, changes of capacity and sweeps, in any order."""

    database: ClassVar[Database]

    def __init__(self) -> None:
        super().__init__()
        self.lines = {name: Line() for name in NAMES}
        self.own: dict[str, int] = {}
        self.for_all: int | None = None

    @initialize()
    def empty(self) -> None:
        with self.database.begin() as connection:
            connection.execute(text("DELETE FROM semaphore_holders"))
            connection.execute(text("DELETE FROM limits"))

    def capacity(self, name: str) -> int:
        return self.own.get(name, DEFAULT if self.for_all is None else self.for_all)

    @rule(name=st.sampled_from(NAMES), holder=st.sampled_from(HOLDERS), times=st.integers(1, 2))
    def ask(self, name: str, holder: UUID, times: int) -> None:
        for _ in range(times):
            answer = semaphores.ask(self.database, name, holder, capacity_default=DEFAULT, lease_s=60)
            line = self.lines[name]
            line.rows = [row for row in line.rows if row.holder == holder or not row.lapsed]
            row = line.of(holder)
            if row is None:
                row = Row(holder)
                line.rows.append(row)
            row.lapsed = False
            if not row.granted:  # who has a place already does not look at the line
                self._grant(name)
            assert answer == (row.granted, 0 if row.granted else line.ahead(row))

    def _grant(self, name: str) -> None:
        line = self.lines[name]
        for row in line.rows:
            if not row.granted and line.used() < self.capacity(name):
                row.granted = True

    @rule(name=st.sampled_from(NAMES), holder=st.sampled_from(HOLDERS), times=st.integers(1, 2))
    def release(self, name: str, holder: UUID, times: int) -> None:
        for _ in range(times):
            line = self.lines[name]
            row = line.of(holder)
            assert semaphores.release(self.database, name, holder) is (row is not None)
            if row is not None:
                line.rows.remove(row)

    @rule(holders=st.sets(st.sampled_from(HOLDERS)))
    def renew(self, holders: set[UUID]) -> None:
        rows = [row for line in self.lines.values() for row in line.rows if row.holder in holders]
        assert semaphores.renew(self.database, list(holders), lease_s=60) == {row.holder for row in rows}
        for row in rows:
            row.lapsed = False

    @rule(name=st.sampled_from(NAMES), holder=st.sampled_from(HOLDERS))
    def crash_and_let_the_lease_lapse(self, name: str, holder: UUID) -> None:
        self.database.sql(
            "UPDATE semaphore_holders SET expires_at = clock_timestamp() - interval '1 ms'"
            " WHERE limit_name = :name AND holder = :holder",
            {"name": name, "holder": holder},
        )
        if (row := self.lines[name].of(holder)) is not None:
            row.lapsed = True

    @rule()
    def sweep(self) -> None:
        gone = 0
        for line in self.lines.values():
            gone += sum(row.lapsed for row in line.rows)
            line.rows = [row for row in line.rows if not row.lapsed]
        assert semaphores.sweep(self.database) == gone

    @rule(name=st.sampled_from(NAMES), capacity=st.integers(0, 4))
    def set_capacity(self, name: str, capacity: int) -> None:
        limits.set_limit(self.database, name, capacity)
        self.own[name] = capacity

    @rule(capacity=st.integers(0, 4))
    def set_capacity_for_all(self, capacity: int) -> None:
        limits.set_limit(self.database, "image_builds:*", capacity)
        self.for_all = capacity

    @precondition(lambda self: self.own)
    @rule(data=st.data())
    def clear_capacity(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.own)))
        limits.clear_limit(self.database, name)
        del self.own[name]

    @invariant()
    def the_rows_are_those_of_the_model(self) -> None:
        rows = self.database.sql(
            "SELECT limit_name, holder, granted_at IS NOT NULL, expires_at <= clock_timestamp()"
            " FROM semaphore_holders ORDER BY limit_name, asked_at, holder"
        ).all()
        expected = [(name, row) for name, line in self.lines.items() for row in line.rows]
        assert [tuple(row) for row in rows] == [(name, r.holder, r.granted, r.lapsed) for name, r in expected]


class CallConcurrency(RuleBasedStateMachine):
    """The concurrency of model calls: askers, leavers, crashes and changes of capacity, in any order."""

    client: ClassVar[redis.Redis]
    KEYS: ClassVar[list[str]] = ["members", "sum", "line", "seen"]

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.acquire = self.client.register_script(scripts.ACQUIRE)
        self.settle = self.client.register_script(scripts.SETTLE)
        self.extend = self.client.register_script(scripts.RENEW)
        self.capacity = 2
        self.inside: dict[str, bool] = {}  # whether their lease has lapsed
        self.line: dict[str, bool] = {}

    @rule(holder=st.sampled_from("abcdef"), times=st.integers(1, 2))
    def ask(self, holder: str, times: int) -> None:
        for _ in range(times):
            asked = [holder, 60_000, 60_000, "concurrency", self.capacity, 1]
            taken, _first, ahead, _due = self.acquire(keys=self.KEYS, args=asked)
            self.inside = {name: lapsed for name, lapsed in self.inside.items() if not lapsed}
            self.line = {name: lapsed for name, lapsed in self.line.items() if not lapsed}
            before = list(self.line).index(holder) if holder in self.line else len(self.line)
            fits = holder in self.inside or len(self.inside) + before + 1 <= self.capacity
            assert bool(taken) is fits
            if fits:
                self.line.pop(holder, None)
                self.inside[holder] = False
            else:
                assert ahead == before
                self.line[holder] = False
                time.sleep(0.0015)  # two in the same millisecond stand in the order of their names

    @rule(holder=st.sampled_from("abcdef"), times=st.integers(1, 2))
    def leave(self, holder: str, times: int) -> None:
        for _ in range(times):
            self.settle(keys=self.KEYS, args=[holder, 60_000, -1, "concurrency", 1])
            self.inside.pop(holder, None)
            self.line.pop(holder, None)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        """One that has lapsed, and was not seen to, takes its seat again only when there is one."""
        holder = data.draw(st.sampled_from(sorted(self.inside)))
        kept = self.extend(keys=self.KEYS[:1], args=[holder, 60_000, self.capacity])
        self.inside = {name: lapsed for name, lapsed in self.inside.items() if not lapsed}
        assert bool(kept) is (holder in self.inside or len(self.inside) < self.capacity)
        if kept:
            self.inside[holder] = False

    @rule(holder=st.sampled_from("abcdef"))
    def crash_and_let_the_lease_lapse(self, holder: str) -> None:
        for key, believed in (("members", self.inside), ("seen", self.line)):
            self.client.zadd(key, {holder: 1}, xx=True)
            if holder in believed:
                believed[holder] = True

    @rule(capacity=st.integers(0, 4))
    def set_capacity(self, capacity: int) -> None:
        self.capacity = capacity

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        assert {name.decode() for name in self.client.zrange("members", 0, -1)} == set(self.inside)
        assert [name.decode() for name in self.client.zrange("line", 0, -1)] == list(self.line)
        assert {name.decode() for name in self.client.zrange("seen", 0, -1)} == set(self.line)


def _quiet(examples: int) -> settings:
    patient = list(HealthCheck)
    return settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=patient)


def test_no_order_of_events_breaks_a_semaphore_of_the_ledger(postgres_url: str) -> None:
    database = Database(postgres_url)
    LedgerSemaphores.database = database
    try:
        run_state_machine_as_test(LedgerSemaphores, settings=_quiet(40))
    finally:
        database.close()


def test_no_order_of_events_breaks_the_concurrency_of_model_calls(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        CallConcurrency.client = client
        run_state_machine_as_test(CallConcurrency, settings=_quiet(40))
