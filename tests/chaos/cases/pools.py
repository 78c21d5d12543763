"""Tasks of mode `auto` and a persistent pool that is full or fails: they go to ephemeral instances, and come back."""

from __future__ import annotations

import time
from uuid import UUID

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.ground import Batch, Ground
from tests.chaos.work import Work

_POOL = {"persistent_provider": "simulated", "persistent_slots": 4, "pool_rest_s": 5.0}
_PATIENT = Work(max_attempts=10)


@case("auto-leaves-a-failing-pool", settings=_POOL, within_s=120, least_faults=3)
def auto_leaves_a_failing_pool(ground: Ground) -> None:
    """Whatever runs in the pool fails; tasks of mode `auto` move to ephemeral instances, those that failed too. The
    pool is well again: tasks go there again."""
    ground.simulate(run_s="constant:0.5", infrastructure=1.0)
    ground.start("launcher")
    ground.pool_ready()
    first = ground.submit(16, mode=Mode.AUTO, work=_PATIENT, name="a")
    _await_ends(ground, first.run_id, 16)
    _expect(ground, first, "every task ended on an instance of its own", "mode = 'ephemeral'", 16)
    _expect(ground, first, "three tasks had failed in the pool", "faults > 0", 3)
    failed = ground.rows("SELECT count(*) FROM attempts WHERE mode = 'persistent' AND state = 'error'")[0][0]
    ground.notes.append(f"{failed} attempts failed in the pool before tasks kept away")
    ground.behave(run_s="constant:0.5")
    time.sleep(6)
    second = ground.submit(4, mode=Mode.AUTO, work=_PATIENT, name="b")
    _await_ends(ground, second.run_id, 4)
    _expect(ground, second, "tasks were in the pool again", "mode = 'persistent'", 4)


@case("auto-leaves-a-full-pool", settings=_POOL, within_s=120, least_faults=0)
def auto_leaves_a_full_pool(ground: Ground) -> None:
    """The pool is full for five seconds: tasks of mode `auto` do not wait for it. It is free: they go there again."""
    ground.simulate(run_s="constant:5")
    ground.start("launcher")
    ground.pool_ready()
    ground.submit(4, mode=Mode.PERSISTENT, name="p")
    ground.eventually("SELECT 1 FROM attempts WHERE mode = 'persistent' AND state = 'running' HAVING count(*) = 4")
    ground.behave(run_s="constant:0.2")
    first = ground.submit(4, mode=Mode.AUTO, name="a")
    _await_ends(ground, first.run_id, 4)
    _expect(ground, first, "tasks ran beside the full pool", "mode = 'ephemeral'", 4)
    ground.eventually("SELECT 1 FROM attempts WHERE mode = 'persistent' AND state = 'running' HAVING count(*) = 0")
    second = ground.submit(4, mode=Mode.AUTO, name="b")
    _await_ends(ground, second.run_id, 4)
    _expect(ground, second, "tasks were in the pool again", "mode = 'persistent'", 4)


def _await_ends(ground: Ground, run_id: UUID, count: int) -> None:
    ground.eventually(
        "SELECT 1 FROM tasks WHERE run_id = :run AND state = 'succeeded' HAVING count(*) = :count",
        60,
        run=run_id,
        count=count,
    )


def _expect(ground: Ground, batch: Batch, what: str, where: str, least: int) -> None:
    found = ground.rows(f"SELECT count(*) FROM tasks WHERE run_id = :run AND {where}", run=batch.run_id)[0][0]
    if found < least:
        ground.wrong.append(f"expected that {what}: at least {least}, found {found}")
