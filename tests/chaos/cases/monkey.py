"""The Done-means run: five hundred tasks while a random process of ours is killed every two seconds."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import cast

import docker
import psutil
from docker.errors import DockerException

from app.errors import DatabaseUnavailable, StackNotRunning
from app.models.spec import EnvironmentKind, Mode
from tests.chaos.case import REGISTRY, case
from tests.chaos.ground import Ground
from tests.chaos.supervised import SupervisedPrograms
from tests.chaos.work import Work

_EVERY_S = 2.0
_WEIGHTS = {
    "ephemeral worker": 6,
    "persistent worker": 3,
    "control": 4,
    "launcher": 2,
    "beat": 1,
    "flower": 1,
    "redis": 2,
    "postgres": 1,
}
_FULL, _SHORT = (500, 180.0), (60, 20.0)
"""Tasks, and for how many seconds is killed."""
_size = _SHORT


def go_long() -> None:
    """All five hundred tasks and three minutes."""
    global _size
    _size = _FULL
    REGISTRY["monkey"] = replace(REGISTRY["monkey"], within_s=1200.0, least_faults=45)


@case(
    "monkey",
    own_stack=True,
    within_s=240,
    least_faults=7,
    settings={"ephemeral_capacity": 8, "persistent_slots": 4, "lease_s": 6.0, "ephemeral_idle_s": 8.0},
)
def monkey(ground: Ground) -> None:
    """Under `megaflow up`, with real workers of both modes, in containers where an engine answers, SIGKILL to a random
    process of ours every two seconds: control worker, launcher, a worker, beat, Flower, Redis, PostgreSQL. All end
    graded, none twice, nothing is left behind by the engine's own listing."""
    count, seconds = _size
    work = _work(ground)
    for mode in (Mode.EPHEMERAL, Mode.PERSISTENT):
        ground.submit(count // 2, mode=mode, work=work, name=mode.value)
    killed = _kill_for(ground, seconds)
    ground.notes.append(f"environments: {work.kind.value}; killed: {dict(killed)}")


def _work(ground: Ground) -> Work:
    try:
        engine = docker.from_env()
        engine.ping()
        engine.images.get(ground.settings.base_image)
    except (DockerException, OSError):
        return Work(max_attempts=8)
    return Work(max_attempts=8, kind=EnvironmentKind.DOCKER, image=ground.settings.base_image)


def _kill_for(ground: Ground, seconds: float) -> Counter[str]:
    killed: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(_EVERY_S)
        what = _kill_one(ground)
        if what is not None:
            ground.struck(f"{what} SIGKILL")
            killed[what] += 1
    return killed


def _kill_one(ground: Ground) -> str | None:
    """What was killed; None: it was not there."""
    programs = cast(SupervisedPrograms, ground.programs)
    what = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    pids = _workers(ground, what.split()[0]) if what.endswith("worker") else _program(programs, what)
    if not pids:
        return None
    with suppress(ProcessLookupError):
        os.kill(random.choice(pids), signal.SIGKILL)
        return what
    return None


def _program(programs: SupervisedPrograms, name: str) -> list[int]:
    with suppress(StackNotRunning):
        return [pid for found, pid in programs.pids().items() if found == name]
    return []


def _workers(ground: Ground, mode: str) -> list[int]:
    programs = cast(SupervisedPrograms, ground.programs)
    alive = {process.pid for process in programs.instances() if psutil.pid_exists(process.pid)}
    with suppress(DatabaseUnavailable):
        rows = ground.rows(
            "SELECT handle FROM instances WHERE mode = :m AND state NOT IN ('terminated', 'failed')", m=mode
        )
        return [int(row.handle) for row in rows if row.handle and int(row.handle) in alive]
    return []
