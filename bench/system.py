"""MegaFlow itself, on a stack of its own: started for the benchmark, gone afterwards."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from docker.models.resource import Model

from app import evaluation
from app.client import MegaFlow
from app.ledger import schema
from app.models.outcome import Phase, TaskResult
from app.models.spec import AgentTask, EnvironmentKind, Mode
from app.settings import PREFIX, Settings
from app.stack import engine, lifecycle
from bench.timing import Batch

WIDTH = 4
"""Tasks at once, in every variant that is not one at a time."""


@dataclass
class System:
    """One running installation and the task that everything is measured on."""

    settings: Settings
    flow: MegaFlow
    task: AgentTask
    image: str
    tasks: int = 0
    solved: int = 0
    ephemeral_tasks: int = 0
    instances: int = 0
    """Different ones that ephemeral tasks ran on."""
    left: int = -1
    """Objects of ours in the engine after `down`; known when the block has ended."""

    def one_at_a_time(self, mode: Mode, count: int) -> Batch:
        """Enqueue, wait for the result, enqueue the next."""
        begun = time.monotonic()
        results: list[TaskResult] = []
        took: list[float] = []
        for _ in range(count):
            at = time.monotonic()
            results.append(self.flow.enqueue(self.task, agent="oracle", mode=mode).result(timeout=120))
            took.append(time.monotonic() - at)
        return self._batch(mode, 1, time.monotonic() - begun, took, results)

    def together(self, mode: Mode, count: int) -> Batch:
        """`count` tasks in one call, done `WIDTH` at a time, until the last result is here."""
        begun = time.monotonic()
        run = self.flow.enqueue_many([self.task], agent="oracle", mode=mode, replicas=count)
        results = run.results(timeout=300)
        return self._batch(mode, WIDTH, time.monotonic() - begun, [], results)

    def _batch(self, mode: Mode, width: int, wall_s: float, took: list[float], results: list[TaskResult]) -> Batch:
        self.tasks += len(results)
        self.solved += sum(result.reward == 1.0 for result in results)
        results = [self.torn_down(result) for result in results]
        if mode is Mode.EPHEMERAL:
            self.ephemeral_tasks += len(results)
            self.instances += len({result.attempts[-1].instance_id for result in results})
        return Batch(mode.value, width, len(results), wall_s, took, [phases(result) for result in results])

    def torn_down(self, result: TaskResult) -> TaskResult:
        """The result with its teardown's end, which is written after the outcome that a client waits for."""
        give_up = time.monotonic() + 20
        while Phase.TORN_DOWN not in result.attempts[-1].phases and time.monotonic() < give_up:
            time.sleep(0.02)
            result = self.flow.run(result.run_id).results()[result.replica]
        return result

    def live_instances(self) -> int:
        """Ephemeral instances that have not ended; they get some seconds to go."""
        for _ in range(100):
            with psycopg.connect(self.settings.database()) as connection:
                found = connection.execute(
                    "SELECT count(*) FROM instances WHERE mode = 'ephemeral' AND state NOT IN ('terminated', 'failed')"
                ).fetchone()
            if found == (0,):
                return 0
            time.sleep(0.1)
        assert found is not None
        return int(found[0])


def phases(result: TaskResult) -> dict[str, float]:
    """Seconds from door to door of a task's only attempt, and `claim`: from accepted to claimed."""
    phases = result.attempts[-1].phases
    passed = [phase for phase in Phase if phase in phases and phase is not Phase.INSTANCE_READY]
    # A standing instance was ready long before; an ephemeral one boots between admitted and claimed.
    spans = {
        f"{before.value} → {after.value}": (phases[after] - phases[before]).total_seconds()
        for before, after in pairwise(passed)
    }
    claim_s = (phases[Phase.CLAIMED] - phases[Phase.ACCEPTED]).total_seconds()
    return {**spans, "claim": claim_s}


@contextmanager
def running(task_name: str, say: Callable[[str], None], **overrides: Any) -> Iterator[System]:
    """A stack on a temporary home with the task's image built and every path walked once. `overrides`: settings.

    Raises: MegaFlowError: it cannot be had here; the message says why.
    """
    for name in [name for name in os.environ if name.startswith(PREFIX) and name != f"{PREFIX}DOCKER_URL"]:
        del os.environ[name]  # a user's own installation must not be measured, nor touched
    with tempfile.TemporaryDirectory(prefix="mfb-") as folder:
        settings = Settings(
            home=Path(folder) / "h",
            installation=f"bench-{uuid4().hex[:8]}",
            flower_port=free_port(),
            web_port=free_port(),
            replay_port=free_port(),
            gateway_port=free_port(),
            **{"ephemeral_capacity": WIDTH, "persistent_slots": WIDTH, "persistent_instances": 1, **overrides},
        )
        with _engine(Path(folder) / "e", say):
            try:
                lifecycle.up(settings, say)
                with MegaFlow(settings) as flow:
                    ours = _warm(settings, flow, task_name, say)
                    yield ours
            finally:
                lifecycle.down(settings, say, purge=True)
            ours.left = _left_in_engine(settings)


@contextmanager
def _engine(home: Path, say: Callable[[str], None]) -> Iterator[None]:
    """An engine that outlives the stack, so that what the stack left in it can be counted."""
    settings = Settings(home=home)
    engine.ensure_engine(settings, may_install=True, report=say)
    try:
        yield
    finally:
        engine.stop_engine(settings)  # only one that was started here


def _warm(settings: Settings, flow: MegaFlow, task_name: str, say: Callable[[str], None]) -> System:
    say(f"building the image of {task_name}, and walking both ways once")
    task = next(task for task in evaluation.demo_tasks(settings, EnvironmentKind.DOCKER) if task.name == task_name)
    result = flow.enqueue(task, agent="oracle", mode=Mode.EPHEMERAL).result(timeout=600)
    if result.reward != 1.0:
        raise RuntimeError(f"expected reward 1 of the first task; found {result.end_reason}: {result.failure}")
    flow.enqueue_many([task], agent="oracle", mode=Mode.PERSISTENT, replicas=WIDTH * 2).results(timeout=300)
    return System(settings, flow, task, str(result.attempts[-1].environment["image_id"]))


def _left_in_engine(settings: Settings) -> int:
    """Containers, networks and volumes that carry the installation's label."""
    with engine.connected(settings) as client:
        labelled: dict[str, str | list[str] | bool] = {"label": f"megaflow={settings.installation}"}
        found: list[Model] = [
            *client.containers.list(all=True, filters=labelled, ignore_removed=True),
            *client.networks.list(filters=labelled),
            *client.volumes.list(filters=labelled),
        ]
        return len(found)


@contextmanager
def quiet_ledger(settings: Settings) -> Iterator[MegaFlow]:
    """A client of a second database beside the stack's, which no dispatcher watches; dropped afterwards."""
    name = "megaflow_bench"
    with psycopg.connect(settings.database(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            url = settings.database().replace("/megaflow?", f"/{name}?")
            schema.migrate(url)
            apart = Settings(home=settings.home, installation=settings.installation, database_url=url)
            with MegaFlow(apart) as flow:
                yield flow
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
