"""Accepting tasks: one transaction, bulk-loaded. When it returns, the tasks survive everything but the database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Connection, select, text
from uuid_utils import compat as uuids

from app.errors import IdempotencyConflict
from app.ledger import events
from app.ledger.database import Database
from app.ledger.events import Fact
from app.models.spec import TaskSpec
from app.models.tables import Run, Task


@dataclass(frozen=True, slots=True)
class NewRun:
    """What is submitted together. Every spec becomes `replicas` tasks, which form one group."""

    specs: Sequence[TaskSpec]
    replicas: int = 1
    name: str = ""
    user_name: str = "default"
    purpose: str = "evaluation"
    priority: int = 0
    idempotency_key: str | None = None  # of the whole run


@dataclass(frozen=True, slots=True)
class Accepted:
    """The ids given, in the order of the specs and, within one, of the replicas."""

    run_id: UUID
    task_ids: tuple[UUID, ...]
    names: tuple[str, ...] = field(default=())
    existed: bool = False  # an earlier submission with the same key was found; nothing new was written


def accept(database: Database, new: NewRun) -> Accepted:
    """Write the run, its specs and tasks, and the facts, in one transaction; wake the dispatcher.

    With an idempotency key that was used before, returns that run when its tasks are the same.

    Raises: IdempotencyConflict: the key belongs to other tasks; DatabaseUnavailable: nothing was written.
    """
    run_id = uuids.uuid7()
    with database.begin() as connection:
        if new.idempotency_key is not None and not _first_of_its_key(connection, run_id, new):
            return _earlier(connection, new)
        if new.idempotency_key is None:
            connection.execute(_INSERT_RUN, _run_row(run_id, new))
        return _load(connection, run_id, new)


_INSERT_RUN = text(
    "INSERT INTO runs (id, name, user_name, purpose, total, idempotency_key)"
    " VALUES (:id, :name, :user_name, :purpose, :total, :idempotency_key)"
)


def _run_row(run_id: UUID, new: NewRun) -> dict[str, Any]:
    return {
        "id": run_id,
        "name": new.name or str(run_id)[-12:],
        "user_name": new.user_name,
        "purpose": new.purpose,
        "total": len(new.specs) * new.replicas,
        "idempotency_key": new.idempotency_key,
    }


def _first_of_its_key(connection: Connection, run_id: UUID, new: NewRun) -> bool:
    """Insert the run unless its key is taken; a concurrent twin waits here until the first commits."""
    statement = text(f"{_INSERT_RUN.text} ON CONFLICT (user_name, idempotency_key) DO NOTHING RETURNING id")
    return connection.execute(statement, _run_row(run_id, new)).first() is not None


def _earlier(connection: Connection, new: NewRun) -> Accepted:
    runs, tasks = Run.__table__.c, Task.__table__.c
    run_id = connection.execute(
        select(runs.id).where(runs.user_name == new.user_name, runs.idempotency_key == new.idempotency_key)
    ).scalar_one()
    rows = connection.execute(
        select(tasks.id, tasks.name, tasks.spec_digest).where(tasks.run_id == run_id).order_by(tasks.id)
    ).all()
    wanted = [spec.digest() for spec in new.specs for _ in range(new.replicas)]
    if [row.spec_digest for row in rows] != wanted:
        raise IdempotencyConflict(
            f"idempotency key {new.idempotency_key!r} was used by run {run_id} for {len(rows)} other task(s);"
            f" expected the same tasks again or a new key"
        )
    return Accepted(run_id, tuple(row.id for row in rows), tuple(row.name for row in rows), existed=True)


def _load(connection: Connection, run_id: UUID, new: NewRun) -> Accepted:
    cursor = _driver_connection(connection).cursor()
    digests = _copy_specs(cursor, new.specs)
    rows = list(_task_rows(run_id, new, digests))
    with cursor.copy(f"COPY tasks ({', '.join(_TASK_COLUMNS)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
    # One fact for the whole run: a fact per accepted task would double what a bulk load writes.
    events.append(connection, Fact("run.accepted", run_id=run_id, data={"tasks": len(rows), "name": new.name}))
    events.wake_dispatcher(connection)
    return Accepted(run_id, tuple(row[0] for row in rows), tuple(row[5] for row in rows))


def _driver_connection(connection: Connection) -> psycopg.Connection[Any]:
    driver: psycopg.Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
    return driver


def _copy_specs(cursor: psycopg.Cursor[Any], specs: Sequence[TaskSpec]) -> list[str]:
    """Write the specs that are new; digests in the order given."""
    digests: list[str] = []
    bodies: dict[str, str] = {}
    for spec in specs:
        digest = spec.digest()
        digests.append(digest)
        bodies.setdefault(digest, spec.model_dump_json())
    cursor.execute("CREATE TEMP TABLE new_specs (digest text, body jsonb) ON COMMIT DROP")
    with cursor.copy("COPY new_specs FROM STDIN") as copy:
        for item in bodies.items():
            copy.write_row(item)
    cursor.execute(
        "INSERT INTO specs SELECT digest, body FROM new_specs ORDER BY digest ON CONFLICT (digest) DO NOTHING"
    )
    return digests


_TASK_COLUMNS = (
    "id",
    "run_id",
    "group_id",
    "replica",
    "spec_digest",
    "name",
    "agent",
    "user_name",
    "requested_mode",
    "resource_class",
    "priority",
    "max_attempts",
)


def _task_rows(run_id: UUID, new: NewRun, digests: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for spec, digest in zip(new.specs, digests, strict=True):
        group_id = uuids.uuid7()
        shared = (
            digest,
            spec.task.name,
            spec.agent,
            new.user_name,
            spec.mode.value,
            spec.resource_class,
            new.priority,
            spec.task.limits.max_attempts,
        )
        for replica in range(new.replicas):
            yield (uuids.uuid7(), run_id, group_id, replica, *shared)


def spec_of(connection: Connection, digest: str) -> TaskSpec:
    """The stored spec. Must exist."""
    body = connection.execute(text("SELECT body FROM specs WHERE digest = :digest"), {"digest": digest}).scalar_one()
    return TaskSpec.model_validate_json(body if isinstance(body, str) else json.dumps(body))
