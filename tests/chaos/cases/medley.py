"""A bit of everything in half a minute: what `make test` has time for."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import psutil

from app.ledger import tasks
from app.models.spec import Mode
from app.stopping import nudge
from tests.chaos.case import case
from tests.chaos.fixture import CANCELLED, Fixture
from tests.chaos.launchers.faults import Rule
from tests.chaos.work import Work


@case("medley", within_s=90, least_faults=8)
def medley(fixture: Fixture) -> None:
    """Redis emptied and killed, PostgreSQL restarted, control worker, launcher and workers killed, tasks cancelled, one
    commit in ten reported as failed: all within ten seconds, under load of both modes."""
    doubt = [Rule(point, "commit", do="error", chance=0.1) for point in ("claim", "phase", "finish")]
    fixture.start(launcher=doubt)
    fixture.pool_ready()
    work = Work(seconds=0.8, max_attempts=12)
    batches = [
        fixture.submit(12, mode=mode, work=work, name=mode.value, allowed=CANCELLED, exclusive=True)
        for mode in (Mode.EPHEMERAL, Mode.PERSISTENT)
    ]
    fixture.acting(2)
    waiting = [task_id for batch in batches for task_id in batch.task_ids]
    for what, blow in _blows().items():
        fixture.struck(what)
        blow(fixture)
        time.sleep(0.8)
        fixture.struck("cancel")
        nudge(fixture.settings, tasks.cancel(fixture.database, [random.choice(waiting)]))


def _blows() -> dict[str, Callable[[Fixture], None]]:
    return {
        "workers SIGKILL": _kill_workers,
        "FLUSHALL": _flush,
        "control SIGKILL": lambda fixture: fixture.programs.kill("control"),
        "redis SIGKILL": _restart_redis,
        "launcher SIGKILL": lambda fixture: fixture.programs.kill("launcher"),
        "postgres restart": _restart_postgres,
    }


def _kill_workers(fixture: Fixture) -> None:
    for child in psutil.Process(fixture.programs.pids["launcher"]).children()[:3]:
        os.kill(child.pid, signal.SIGKILL)


def _flush(fixture: Fixture) -> None:
    with fixture.servers.redis() as client:
        client.flushall()


def _restart_redis(fixture: Fixture) -> None:
    fixture.servers.kill_redis(keep_data=False)
    fixture.servers.start_redis()


def _restart_postgres(fixture: Fixture) -> None:
    fixture.servers.stop_postgres()
    fixture.servers.start_postgres()
