"""Five hundred tasks while a random process of ours is killed every two seconds."""

from __future__ import annotations

from dataclasses import replace

import docker
from docker.errors import DockerException

from app.models.spec import EnvironmentKind, Mode
from tests.chaos.case import REGISTRY, case
from tests.chaos.fixture import Fixture
from tests.chaos.killing import kill_for
from tests.chaos.work import Work

_WEIGHTS = {"worker": 9, "control": 4, "launcher": 2, "beat": 1, "redis": 2, "postgres": 1}
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
    within_s=240,
    least_faults=7,
    settings={"ephemeral_capacity": 8, "persistent_slots": 4, "lease_s": 6.0, "ephemeral_idle_s": 8.0},
)
def monkey(fixture: Fixture) -> None:
    """With workers of both modes, in containers where an engine answers, SIGKILL to a random process of ours every two
    seconds: control worker, launcher, a worker, beat, Redis, PostgreSQL. All end graded, none twice, nothing is left
    behind by the engine's own listing."""
    count, seconds = _size
    fixture.start("launcher", "control", "beat")
    work = _work(fixture)
    for mode in (Mode.EPHEMERAL, Mode.PERSISTENT):
        fixture.submit(count // 2, mode=mode, work=work, name=mode.value)
    killed = kill_for(fixture, seconds, _WEIGHTS)
    fixture.notes.append(f"environments: {work.kind.value}; killed: {dict(killed)}")


def _work(fixture: Fixture) -> Work:
    try:
        engine = docker.from_env()
        engine.ping()
        engine.images.get(fixture.settings.base_image)
    except (DockerException, OSError):
        return Work(max_attempts=8)
    return Work(max_attempts=8, kind=EnvironmentKind.DOCKER, image=fixture.settings.base_image)
