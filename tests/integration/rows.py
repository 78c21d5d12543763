"""Rows written straight into the tables, with the times that a test wants: for what reads or sweeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text

from app.ledger import model_calls
from app.ledger.database import Database
from app.ledger.model_calls import NewCall, packed
from tests.building import new_id

_now = datetime.now(UTC)


def begin() -> None:
    """Now is now: called before every test, and by those that write many ledgers."""
    global _now
    _now = datetime.now(UTC)


def ago(seconds: float) -> datetime:
    """A moment before this test began; exact, so that spans can be compared."""
    return _now - timedelta(seconds=seconds)


def insert(database: Database, table: str, **values: Any) -> None:
    """One row; dictionaries become JSON."""
    columns = ", ".join(values)
    places = ", ".join(f"CAST(:{c} AS jsonb)" if isinstance(v, dict) else f":{c}" for c, v in values.items())
    plain = {c: json.dumps(v, default=str) if isinstance(v, dict) else v for c, v in values.items()}
    database.sql(f"INSERT INTO {table} ({columns}) VALUES ({places})", plain)


def a_run(database: Database, *, user: str = "alice", name: str = "night", total: int = 1, **values: Any) -> UUID:
    run_id = new_id()
    insert(database, "runs", id=run_id, name=name, user_name=user, purpose="evaluation", total=total, **values)
    return run_id


def a_task(database: Database, run_id: UUID, *, user: str = "alice", mode: str = "ephemeral", **values: Any) -> UUID:
    """A pending task in line, unless `values` say otherwise."""
    task_id = new_id()
    database.sql("INSERT INTO specs (digest, body) VALUES ('s', '{}') ON CONFLICT DO NOTHING")
    defaults = {
        "group_id": task_id,
        "replica": 0,
        "spec_digest": "s",
        "name": "fix-it",
        "agent": "nop",
        "requested_mode": mode,
        "resource_class": "standard",
        "lifetime_s": 60.0,
        "max_attempts": 3,
    }
    insert(database, "tasks", id=task_id, run_id=run_id, user_name=user, **(defaults | values))
    return task_id


def an_attempt(
    database: Database, task_id: UUID, *, user: str = "alice", mode: str = "ephemeral", number: int = 1, **values: Any
) -> UUID:
    """A dispatched attempt, unless `values` say otherwise; the task's own row is the caller's business."""
    attempt_id = new_id()
    defaults: dict[str, Any] = {"resource_class": "standard", "state": "dispatched"}
    insert(
        database,
        "attempts",
        id=attempt_id,
        task_id=task_id,
        number=number,
        user_name=user,
        mode=mode,
        **(defaults | values),
    )
    return attempt_id


def an_instance(database: Database, *, mode: str = "ephemeral", **values: Any) -> UUID:
    defaults: dict[str, Any] = {"provider": "process", "resource_class": "standard", "slots": 1, "state": "ready"}
    row = {"id": new_id()} | defaults | values
    insert(database, "instances", mode=mode, **row)
    return UUID(str(row["id"]))


def write(database: Database, statement: str, **values: Any) -> None:
    database.sql(statement, values)


def force(database: Database, statement: str, **values: Any) -> None:
    """Past every trigger and foreign key, as a bug or a person with psql would."""
    with database.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        connection.execute(text(statement), values)


def one(database: Database, statement: str, **values: Any) -> Any:
    """The only row of a query."""
    return database.sql(statement, values).one()


def every(database: Database, statement: str, **values: Any) -> Sequence[Any]:
    """All rows of a query."""
    return database.sql(statement, values).all()


def kill_sessions(database: Database, which: str = "true") -> None:
    """Those that others have with this database: all, as a restart of the server would, or these."""
    write(
        database,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        f" AND {which}",
    )


def facts(database: Database) -> list[tuple[str, dict[str, Any]]]:
    """Kind and data of every fact, in order."""
    rows = database.sql("SELECT kind, data FROM events ORDER BY id")
    return [(row.kind, row.data) for row in rows]


def paused(database: Database) -> Sequence[Row[Any]]:
    return database.sql("SELECT name, since, reason FROM pauses ORDER BY since").all()


def a_call(database: Database, *, cost_usd: float | None, **given: Any) -> None:
    """A model call that ended; of an attempt, a task and a run that are nobody's where they are not given."""
    values = {
        "id": new_id(),
        "attempt_id": new_id(),
        "task_id": new_id(),
        "run_id": new_id(),
        "user_name": "alice",
        "dialect": "messages",
        "model": "m",
        "upstream_model": "m",
        "replica": "",
        "policy_version": "",
        "started_at": ago(5),
        "duration_s": 0.1,
        "streamed": False,
        "end_kind": "answered",
        "is_turn": True,
        "messages": [],
        "body": packed({}),
        "detail": "",
        "finish_reason": "stop",
        "retries": 0,
    }
    with database.begin() as connection:
        model_calls.store(connection, [NewCall({**values, **given, "cost_usd": cost_usd})])
