"""Tasks of mode `auto` and a persistent pool that is full or fails: they go to ephemeral instances, and come back."""

from __future__ import annotations

import time
from uuid import UUID

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Batch, Fixture
from tests.chaos.work import Work

_POOL = {"persistent_provider": "simulated", "persistent_slots": 4, "pool_rest_s": 5.0}
_PATIENT = Work(max_attempts=10)


@case("auto-leaves-a-failing-pool", settings=_POOL, within_s=120, least_faults=3)
def auto_leaves_a_failing_pool(fixture: Fixture) -> None:
    """Whatever runs in the pool fails; tasks of mode `auto` move to ephemeral instances, those that failed too. The
    pool is well again: tasks go there again."""
    fixture.simulate(run_s="constant:0.5", infrastructure=1.0)
    fixture.start("launcher")
    fixture.pool_ready()
    first = fixture.submit(16, mode=Mode.AUTO, work=_PATIENT, name="a")
    _await_ends(fixture, first.run_id, 16)
    _expect(fixture, first, "every task ended on an instance of its own", "mode = 'ephemeral'", 16)
    _expect(fixture, first, "three tasks had failed in the pool", "faults > 0", 3)
    failed = fixture.rows("SELECT count(*) FROM attempts WHERE mode = 'persistent' AND state = 'error'")[0][0]
    fixture.notes.append(f"{failed} attempts failed in the pool before tasks kept away")
    fixture.behave(run_s="constant:0.5")
    time.sleep(6)
    second = fixture.submit(4, mode=Mode.AUTO, work=_PATIENT, name="b")
    _await_ends(fixture, second.run_id, 4)
    _expect(fixture, second, "tasks were in the pool again", "mode = 'persistent'", 4)


@case("auto-leaves-a-full-pool", settings=_POOL, within_s=120, least_faults=0)
def auto_leaves_a_full_pool(fixture: Fixture) -> None:
    """The pool is full for five seconds: tasks of mode `auto` do not wait for it. It is free: they go there again."""
    fixture.simulate(run_s="constant:5")
    fixture.start("launcher")
    fixture.pool_ready()
    fixture.submit(4, mode=Mode.PERSISTENT, name="p")
    fixture.eventually("SELECT 1 FROM attempts WHERE mode = 'persistent' AND state = 'running' HAVING count(*) = 4")
    fixture.behave(run_s="constant:0.2")
    first = fixture.submit(4, mode=Mode.AUTO, name="a")
    _await_ends(fixture, first.run_id, 4)
    _expect(fixture, first, "tasks ran beside the full pool", "mode = 'ephemeral'", 4)
    fixture.eventually("SELECT 1 FROM attempts WHERE mode = 'persistent' AND state = 'running' HAVING count(*) = 0")
    second = fixture.submit(4, mode=Mode.AUTO, name="b")
    _await_ends(fixture, second.run_id, 4)
    _expect(fixture, second, "tasks were in the pool again", "mode = 'persistent'", 4)


def _await_ends(fixture: Fixture, run_id: UUID, count: int) -> None:
    fixture.eventually(
        "SELECT 1 FROM tasks WHERE run_id = :run AND state = 'succeeded' HAVING count(*) = :count",
        60,
        run=run_id,
        count=count,
    )


def _expect(fixture: Fixture, batch: Batch, what: str, where: str, least: int) -> None:
    found = fixture.rows(f"SELECT count(*) FROM tasks WHERE run_id = :run AND {where}", run=batch.run_id)[0][0]
    if found < least:
        fixture.wrong.append(f"expected that {what}: at least {least}, found {found}")
