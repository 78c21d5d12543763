"""Reading what came of runs and tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import UnknownName
from app.ledger.database import Database
from app.ledger.names import find
from app.models.outcome import Artifact, AttemptRecord, TaskResult
from app.models.spec import TaskSpec
from app.models.states import ENDED_TASK, TaskState

__all__ = [
    "RunStatus",
    "ended",
    "find",
    "open_networks",
    "results",
    "run_status",
    "runs",
    "state_of",
    "task_ids",
    "task_spec",
]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands. `resolved` and `mean_reward` are of the `measured` tasks alone.

    Tasks with scripted answers are none of these: `scripted` were graded so, and of them `scripted_resolved` solved.
    """

    id: UUID
    name: str
    user_name: str
    purpose: str
    created_at: datetime
    total: int
    states: dict[str, int]
    measured: int
    resolved: int
    mean_reward: float | None
    scripted: int
    scripted_resolved: int
    finished_at: datetime | None

    @property
    def ended(self) -> int:
        return sum(self.states.get(state.value, 0) for state in ENDED_TASK)

    @property
    def done(self) -> bool:
        return self.ended >= self.total


_STATUS = """
SELECT r.id, r.name, r.user_name, r.purpose, r.created_at, r.total,
    (SELECT jsonb_object_agg(state, n) FROM
        (SELECT state, count(*) AS n FROM tasks WHERE run_id = r.id GROUP BY state) s) AS states,
    t.measured, t.resolved, t.mean_reward, t.scripted, t.scripted_resolved, t.finished_at
FROM runs r CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE counts AND NOT scripted) AS measured,
        count(*) FILTER (WHERE counts AND NOT scripted AND reward >= 1) AS resolved,
        avg(reward) FILTER (WHERE counts AND NOT scripted) AS mean_reward,
        count(*) FILTER (WHERE counts AND scripted) AS scripted,
        count(*) FILTER (WHERE counts AND scripted AND reward >= 1) AS scripted_resolved,
        max(finished_at) AS finished_at
    FROM (SELECT scripted, finished_at, (verdict->>'counts')::bool AS counts,
        (verdict->>'reward')::float8 AS reward FROM tasks WHERE run_id = r.id) of_run) t
"""


def run_status(database: Database, run_id: UUID) -> RunStatus:
    """Raises: UnknownName."""
    with database.begin() as connection:
        row = connection.execute(text(f"{_STATUS} WHERE r.id = :id"), {"id": run_id}).first()
    if row is None:
        raise UnknownName(f"unknown run {run_id}; `megaflow runs` lists them")
    return _status(row)


def runs(database: Database, limit: int = 50) -> list[RunStatus]:
    """The newest runs first."""
    with database.begin() as connection:
        statement = text(f"{_STATUS} ORDER BY r.created_at DESC LIMIT :limit")
        return [_status(row) for row in connection.execute(statement, {"limit": limit})]


def open_networks(database: Database, run_id: UUID) -> int:
    """How many tasks of a run have the network `open`."""
    statement = text("""
        SELECT coalesce(sum(t.n), 0) FROM
            (SELECT spec_digest, count(*) AS n FROM tasks WHERE run_id = :id GROUP BY spec_digest) t
            JOIN specs s ON s.digest = t.spec_digest
        WHERE s.body::json #>> '{task,environment,network}' = 'open'""")
    with database.begin() as connection:
        return int(connection.execute(statement, {"id": run_id}).scalar_one())


def _status(row: Row[Any]) -> RunStatus:
    values = row._asdict()
    return RunStatus(**{**values, "states": values["states"] or {}})


def ended(database: Database, task_ids: Sequence[UUID]) -> list[UUID]:
    """Those of the tasks that have ended."""
    with database.begin() as connection:
        rows = connection.execute(
            text("SELECT id FROM tasks WHERE id = ANY(:ids) AND state IN ('succeeded', 'failed', 'cancelled')"),
            {"ids": list(task_ids)},
        )
        return list(rows.scalars())


def state_of(database: Database, task_id: UUID) -> TaskState:
    """Raises: UnknownName."""
    with database.begin() as connection:
        state = connection.execute(text("SELECT state FROM tasks WHERE id = :id"), {"id": task_id}).scalar()
    if state is None:
        raise UnknownName(f"unknown task {task_id}")
    return TaskState(state)


def task_ids(database: Database, run_id: UUID) -> list[UUID]:
    """The run's tasks in the order of their acceptance."""
    with database.begin() as connection:
        rows = connection.execute(text("SELECT id FROM tasks WHERE run_id = :id ORDER BY id"), {"id": run_id})
        return list(rows.scalars())


def task_spec(database: Database, task_id: UUID) -> TaskSpec:
    """Raises: UnknownName."""
    with database.begin() as connection:
        digest = connection.execute(text("SELECT spec_digest FROM tasks WHERE id = :id"), {"id": task_id}).scalar()
        if digest is None:
            raise UnknownName(f"unknown task {task_id}")
        from app.ledger.accept import spec_of  # with all that accepting a task needs

        return spec_of(connection, digest)


def results(database: Database, ids: Sequence[UUID]) -> list[TaskResult]:
    """Tasks with all their attempts and artifacts, in the order of `ids`; three queries however many."""
    wanted = {"ids": list(ids)}
    with database.begin() as connection:
        tasks = {row.id: row for row in connection.execute(_TASKS, wanted)}
        tries = _attempts(connection, wanted)
    missing = [task_id for task_id in ids if task_id not in tasks]
    if missing:
        raise UnknownName(f"unknown task {missing[0]}")
    return [_result(tasks[task_id], tries[task_id]) for task_id in ids]


_TASKS = text(
    "SELECT id, run_id, name, replica, agent, model, mode, requested_mode, state, end_reason, verdict, scripted,"
    " failure FROM tasks WHERE id = ANY(:ids)"
)


def _attempts(connection: Connection, wanted: dict[str, Any]) -> dict[UUID, list[AttemptRecord]]:
    artifacts: dict[UUID, list[Artifact]] = defaultdict(list)
    for row in connection.execute(
        text(
            "SELECT r.* FROM artifacts r JOIN attempts a ON a.id = r.attempt_id WHERE a.task_id = ANY(:ids)"
            " ORDER BY r.stored_at, r.kind"
        ),
        wanted,
    ):
        fields = {k: v for k, v in row._asdict().items() if k not in ("attempt_id", "stored_at")}
        artifacts[row.attempt_id].append(Artifact.model_validate(fields))
    tries: dict[UUID, list[AttemptRecord]] = defaultdict(list)
    for row in connection.execute(
        text(
            "SELECT a.id, a.task_id, a.number, a.state, a.mode, a.instance_id, a.environment, a.end_reason, a.failure,"
            " a.verdict, a.scripted, a.phases, i.provider || ' ' || coalesce(i.handle, '?') AS instance FROM attempts a"
            " LEFT JOIN instances i ON i.id = a.instance_id WHERE a.task_id = ANY(:ids) ORDER BY a.number"
        ),
        wanted,
    ):
        tries[row.task_id].append(_attempt(row, artifacts[row.id]))
    return tries


def _attempt(row: Row[Any], artifacts: list[Artifact]) -> AttemptRecord:
    names = ("id", "number", "state", "mode", "instance_id", "instance", "environment", "end_reason", "failure")
    values = {name: getattr(row, name) for name in (*names, "verdict", "scripted", "phases")}
    values["phases"] = {k: v for k, v in sorted(values["phases"].items(), key=lambda item: str(item[1])) if v}
    return AttemptRecord.model_validate({**values, "artifacts": artifacts})


def _result(row: Row[Any], tries: list[AttemptRecord]) -> TaskResult:
    return TaskResult.model_validate(
        {
            "task_id": row.id,
            "run_id": row.run_id,
            "name": row.name,
            "replica": row.replica,
            "agent": row.agent,
            "model": row.model,
            "mode": row.mode or row.requested_mode,
            "state": row.state,
            "end_reason": row.end_reason,
            "verdict": row.verdict,
            "scripted": row.scripted,
            "failure": row.failure,
            "attempts": tries,
        }
    )
