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
from tests.chaos.ground import CANCELLED, Ground
from tests.chaos.launchers.faults import Rule
from tests.chaos.work import Work


@case("medley", within_s=90, least_faults=8)
def medley(ground: Ground) -> None:
    """Redis emptied and killed, PostgreSQL restarted, control worker, launcher and workers killed, tasks cancelled, one
    commit in ten reported as failed: all within ten seconds, under load of both modes."""
    doubt = [Rule(point, "commit", do="error", chance=0.1) for point in ("claim", "phase", "finish")]
    ground.start(launcher=doubt)
    ground.pool_ready()
    work = Work(seconds=0.8, max_attempts=12)
    batches = [
        ground.submit(12, mode=mode, work=work, name=mode.value, allowed=CANCELLED, exclusive=True)
        for mode in (Mode.EPHEMERAL, Mode.PERSISTENT)
    ]
    ground.acting(2)
    waiting = [task_id for batch in batches for task_id in batch.task_ids]
    for what, blow in _blows().items():
        ground.struck(what)
        blow(ground)
        time.sleep(0.8)
        ground.struck("cancel")
        nudge(ground.settings, tasks.cancel(ground.database, [random.choice(waiting)]))


def _blows() -> dict[str, Callable[[Ground], None]]:
    return {
        "workers SIGKILL": _kill_workers,
        "FLUSHALL": _flush,
        "control SIGKILL": lambda ground: ground.programs.kill("control"),
        "redis SIGKILL": _restart_redis,
        "launcher SIGKILL": lambda ground: ground.programs.kill("launcher"),
        "postgres restart": _restart_postgres,
    }


def _kill_workers(ground: Ground) -> None:
    for child in psutil.Process(ground.programs.pids["launcher"]).children()[:3]:
        os.kill(child.pid, signal.SIGKILL)


def _flush(ground: Ground) -> None:
    with ground.servers.redis() as client:
        client.flushall()


def _restart_redis(ground: Ground) -> None:
    ground.servers.kill_redis(keep_data=False)
    ground.servers.start_redis()


def _restart_postgres(ground: Ground) -> None:
    ground.servers.stop_postgres()
    ground.servers.start_postgres()
