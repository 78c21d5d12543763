"""A busy system raises no alarm: threads use the ledger's verbs at once while the auditor looks on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import pytest
from sqlalchemy import text

from app.errors import DatabaseUnavailable, StaleWriter
from app.ledger import accept, admission, attempts, audit, ends, instances, pauses, receipts, results, tasks, waiting
from app.ledger.accept import NewRun
from app.ledger.admission import QueuedMessage
from app.ledger.attempts import Claim
from app.ledger.database import DEADLOCK, Database
from app.ledger.instances import InstanceDemand
from app.models.endings import EndReason
from app.models.outcome import Failure, Phase, Verdict
from app.models.spec import Mode
from app.settings import Settings
from tests.building import RETRY, a_spec, ready_instance
from tests.integration.rows import write
from tests.services import MakeSettings

_SECONDS = 4.0
_RESULT = [EndReason.ENVIRONMENT_ERROR, EndReason.MODEL_ERROR, EndReason.INTERRUPTED, EndReason.CANCELLED]


class Busy:
    """Producers, a dispatcher, workers, people and accidents, each a loop in a thread."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database = database
        self.random = random.Random(seed)
        self.hints: SimpleQueue[QueuedMessage] = SimpleQueue()
        self.over = threading.Event()
        self.claimed = 0
        self.ended = 0
        with database.begin() as connection:
            # The pool that never dies has room for all: what is admitted to it needs no counting here.
            (self.pool,) = instances.request(
                connection, InstanceDemand("process", Mode.PERSISTENT, "standard", 10_000, 1, None)
            )
        assert instances.ready(database, self.pool)

    def keep(self, work: Callable[[], None]) -> None:
        while not self.over.is_set():
            try:
                work()
            except (StaleWriter, Empty):
                continue
            except DatabaseUnavailable as error:
                # Two verbs that met: PostgreSQL undid one, whose caller tries again.
                if getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) != DEADLOCK:
                    raise

    def produce(self) -> None:
        mode = self.random.choice([Mode.EPHEMERAL, Mode.PERSISTENT])
        accept.accept(self.database, NewRun(specs=[a_spec("t", mode=mode, max_attempts=2)], replicas=5))
        time.sleep(0.02)

    def dispatch(self) -> None:
        with self.database.begin() as connection:
            admission.in_turn(connection)
            admission.promote(connection, 1000)
            waiting_tasks = connection.execute(
                text(
                    "SELECT id, requested_mode FROM tasks WHERE state = 'pending' AND in_line"
                    " AND available_at <= clock_timestamp() AND cancel_requested_at IS NULL LIMIT 20"
                )
            ).all()
            for item in admission.admit(connection, [(row.id, Mode(row.requested_mode)) for row in waiting_tasks]):
                self.hints.put(item)

    def work(self) -> None:
        item = self.hints.get(timeout=0.1)
        instance_id = self.pool if item.mode == Mode.PERSISTENT else ready_instance(self.database, item.mode)
        claim = attempts.claim(self.database, item.message, instance_id, lease_s=30)
        if claim is not None:
            self.claimed += 1
            self.carry_out(claim)
        if item.mode == Mode.EPHEMERAL:
            instances.exited(self.database, instance_id, self.random.choice([0, 0, 75, -9]), "left", RETRY)

    def carry_out(self, claim: Claim) -> None:
        attempts.record_phase(self.database, claim, Phase.IMAGE_READY)
        attempts.renew(self.database, [claim.attempt_id], lease_s=30)
        match self.random.random():
            case lucky if lucky < 0.5:
                ends.finish(self.database, claim, verdict=Verdict(reward=1.0, counts=True))
            case lucky if lucky < 0.8:
                failure, reason = Failure(error="x", message="x"), self.random.choice(_RESULT)
                ends.fail(self.database, claim, end_reason=reason, failure=failure, retry=RETRY)
            case _:
                return  # its instance dies with it, or its lease lapses
        self.ended += 1

    def lapse(self) -> None:
        write(
            self.database,
            "UPDATE leases SET expires_at = clock_timestamp() - interval '1 s' WHERE attempt_id IN"
            " (SELECT attempt_id FROM leases ORDER BY random() LIMIT 3 FOR UPDATE SKIP LOCKED)",
        )
        with self.database.begin() as connection:
            waiting.reclaim_lapsed(connection, RETRY)
        time.sleep(0.02)

    def meddle(self) -> None:
        """People: cancel, retry, pause and resume."""
        runs = results.runs(self.database, 20)
        if not runs:
            return
        run = self.random.choice(runs)
        ids = results.task_ids(self.database, run.id)
        self.random.choice(
            [
                lambda: tasks.cancel(self.database, self.random.sample(ids, 2)),
                lambda: tasks.retry(self.database, ids),
                lambda: pauses.pause(self.database, str(run.id)),
                lambda: pauses.resume(self.database, str(run.id)),
            ]
        )()
        time.sleep(0.01)

    def receipts(self) -> None:
        receipts.issue(self.database)
        time.sleep(0.05)


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=100_000)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    found = Database(settings.database(), pool_size=12)
    yield found
    found.close()


def test_a_busy_system_raises_no_alarm(database: Database, settings: Settings) -> None:
    busy = Busy(database, seed=7)
    loops = [busy.produce, busy.dispatch, busy.work, busy.work, busy.work, busy.lapse, busy.meddle, busy.receipts]
    looks = 0
    memory = None
    until = time.monotonic() + _SECONDS
    with ThreadPoolExecutor(len(loops)) as threads:
        working = [threads.submit(busy.keep, loop) for loop in loops]
        try:
            while time.monotonic() < until and not any(one.done() for one in working):
                seen = audit.look(database, settings, memory)
                memory = seen.memory
                looks += 1
                assert seen.findings == ()
        finally:
            busy.over.set()
        for one in working:
            one.result()
    assert looks > 5
    assert busy.claimed > 20
    assert busy.ended > 10
    assert audit.look(database, settings, memory).findings == ()
