"""What the control plane is measured on: a private stack with simulated instances, and the ledger's own times.

Times come from the ledger, so that one clock has them all: PostgreSQL's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import LiteralString
from uuid import UUID, uuid4

import psycopg
import redis as redis_client

from app.ledger import accept
from app.ledger.accept import Accepted, NewRun
from app.ledger.database import Database
from app.models.simulation import Simulation
from app.models.spec import AgentTask, Bundle, EnvironmentSpec, Mode, ScriptGoal, TaskSpec
from app.settings import PREFIX
from app.stack.private import PrivateStack, private_stack
from bench.control_figures import quantile

Say = Callable[[str], None]
"""Tells a person what is being measured now."""

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Span:
    """One task's way, on PostgreSQL's clock. `attempts` is 1 unless something was lost."""

    user: str
    state: str
    attempts: int
    accepted: datetime
    claimed: datetime | None
    finished: datetime | None

    @property
    def claim_s(self) -> float:
        """From accepted to claimed."""
        assert self.claimed is not None
        return (self.claimed - self.accepted).total_seconds()


@dataclass(frozen=True, slots=True)
class System:
    """A running stack, and how work is given to it."""

    stack: PrivateStack
    database: Database
    connection: psycopg.Connection

    def submit(
        self, count: int, *, user: str = "default", mode: Mode = Mode.PERSISTENT, name: str = "task"
    ) -> Accepted:
        """Accept `count` equal tasks in one call, each a group of its own: replicas would go first as one."""
        return accept.accept(self.database, NewRun(specs=[a_spec(mode=mode, name=name)] * count, user_name=user))

    def behave(self, run_s: str) -> None:
        """What is claimed from here on takes so long, e.g. `uniform:1,3`."""
        self.stack.provider().behave(Simulation.of(run_s=run_s))

    def spans(self, *runs: UUID) -> list[Span]:
        """Every task of the runs, as the ledger has it now; times are those of the last attempt."""
        rows = self.connection.execute(
            "SELECT t.user_name, t.state, t.attempts, t.accepted_at, a.claimed_at, a.finished_at FROM tasks t"
            " LEFT JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts WHERE t.run_id = ANY(%s)",
            [list(runs)],
        )
        return [Span(*row) for row in rows]

    def count(self, state: str, *runs: UUID) -> int:
        """Tasks of the runs in that state now."""
        return self.number("SELECT count(*) FROM tasks WHERE run_id = ANY(%s) AND state = %s", [list(runs), state])

    def number(self, query: LiteralString, values: list[object] | None = None) -> int:
        """The one number that a query answers with."""
        row = self.connection.execute(query, values).fetchone()
        assert row is not None
        return int(row[0])

    def until(self, what: str, reached: Callable[[], bool], timeout_s: float, poll_s: float = _POLL_S) -> None:
        """Wait. Raises: RuntimeError: it took too long."""
        give_up = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > give_up:
                raise RuntimeError(f"expected {what} within {timeout_s:g} s; {self._situation()}")
            time.sleep(poll_s)

    def until_ended(self, run: Accepted, timeout_s: float) -> None:
        """Until every task of the run has ended. Raises: RuntimeError: it took too long."""
        query: LiteralString = (
            "SELECT count(*) FROM tasks WHERE run_id = %s AND state NOT IN ('succeeded', 'failed', 'cancelled')"
        )
        self.until("the run's end", lambda: self.number(query, [run.run_id]) == 0, timeout_s)

    def until_pool_stands(self, instances: int, timeout_s: float = 60.0) -> None:
        """Until so many standing instances are ready."""
        query: LiteralString = "SELECT count(*) FROM instances WHERE mode = 'persistent' AND state = 'ready'"
        self.until(f"{instances} standing instances", lambda: self.number(query) >= instances, timeout_s)

    def _situation(self) -> str:
        rows = self.connection.execute("SELECT state, count(*) FROM tasks GROUP BY 1 ORDER BY 1").fetchall()
        return f"found tasks {dict(rows)}; the simulation says {self.stack.provider().counts()}"


@contextmanager
def running(run_s: str, **overrides: object) -> Iterator[System]:
    """A stack of one control worker and simulated instances, with these settings.

    Raises: MegaFlowError: it cannot be had here.
    """
    forget_installation()
    with private_stack(overrides, simulation=Simulation.of(run_s=run_s)) as stack:
        database = Database(stack.settings.database())
        with psycopg.connect(stack.settings.database(), autocommit=True) as connection:
            try:
                yield System(stack, database, connection)
            finally:
                database.close()


def forget_installation() -> None:
    """A user's own installation must not be measured, nor touched."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]


def a_task(number: int, name: str = "task") -> AgentTask:
    """A task as large as a small one of a real dataset; each number has another spec."""
    return AgentTask(
        name=f"{name}-{number}",
        description="Make the failing test pass without changing what the others expect of the parser.",
        environment=EnvironmentSpec(image="registry.example/suite/image:1"),
        goal=ScriptGoal(tests=Bundle(sha256=f"{number:064x}", size_bytes=10_240)),
    )


def a_spec(number: int = 0, *, mode: Mode = Mode.PERSISTENT, name: str = "task") -> TaskSpec:
    return TaskSpec(task=a_task(number, name), agent="nop", mode=mode)


# --- Servers alone --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Servers:
    """PostgreSQL and Redis as `megaflow up` configures them: what is measured is really durable."""

    stack: PrivateStack

    @contextmanager
    def fresh_database(self, *, migrated: bool = True) -> Iterator[str]:
        """The URL of an empty database, with our tables or without; dropped afterwards."""
        name = f"bench_{uuid4().hex[:8]}"
        template = "megaflow" if migrated else "template1"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
            connection.execute("CHECKPOINT")  # nobody pays for the pages that somebody before them has dirtied
            try:
                yield self._url(name)
            finally:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def durability(self) -> dict[str, str]:
        """What the servers themselves say about it, and how long the disk takes to be sure of 8 kB."""
        with psycopg.connect(self._url("postgres")) as connection:
            rows = connection.execute(
                "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'synchronous_commit',"
                " 'full_page_writes', 'wal_sync_method', 'server_version', 'shared_buffers')"
            ).fetchall()
        with redis_client.Redis.from_url(self.stack.settings.redis(), decode_responses=True) as client:
            said = {f"redis_{name}": str(client.config_get(name)[name]) for name in ("appendonly", "appendfsync")}
            said["redis_version"] = str(client.info("server")["redis_version"])
        return {**dict(rows), **said, "fdatasync_ms_p50": f"{_fdatasync_s(self.stack.settings.home) * 1000:.3g}"}

    def _url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.stack.settings.postgres_socket_dir}"


@contextmanager
def servers() -> Iterator[Servers]:
    """Both servers, and nothing else of ours. Raises: MegaFlowError: they cannot be had here."""
    forget_installation()
    with private_stack(control_workers=0) as stack:
        yield Servers(stack)


def _fdatasync_s(folder: Path) -> float:
    took: list[float] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(100):
            os.pwrite(file.fileno(), os.urandom(8192), 0)
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - begun)
    return quantile(took, 0.5)
