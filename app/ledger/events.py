"""Appends events in the transaction that they record, and notifies waiting processes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, insert, select

from app.ledger.database import Database, sql
from app.models.tables import EventRow

WORK = "megaflow_work"
"""Channel that wakes the dispatcher. No payload."""
OUTCOME = "megaflow_outcome"
"""Channel: the task named in the payload has ended."""


class Fact(NamedTuple):
    """An event to append; the database adds its id and time."""

    kind: str
    run_id: UUID | None = None
    task_id: UUID | None = None
    attempt_id: UUID | None = None
    instance_id: UUID | None = None
    data: dict[str, Any] = {}


def append(connection: Connection, *facts: Fact) -> None:
    """Appends events within the caller's transaction."""
    if facts:
        connection.execute(insert(EventRow), [fact._asdict() for fact in facts])


def wake_dispatcher(connection: Connection) -> None:
    """Wakes the dispatcher when this transaction commits; several calls in one transaction send one notification."""
    sql(connection, f"NOTIFY {WORK}")


def tell_outcome(connection: Connection, task_ids: Sequence[UUID]) -> None:
    """Notifies waiting clients, when this transaction commits, that these tasks have ended."""
    sql(
        connection,
        "SELECT pg_notify(:channel, id::text) FROM unnest(CAST(:ids AS uuid[])) AS id",
        {"channel": OUTCOME, "ids": list(task_ids)},
    )


class EventRecord(NamedTuple):
    """A stored event."""

    id: int
    at: datetime
    kind: str
    run_id: UUID | None
    task_id: UUID | None
    attempt_id: UUID | None
    instance_id: UUID | None
    data: dict[str, Any]


def of_task(database: Database, task_id: UUID) -> list[EventRecord]:
    """Returns all events of a task, in order."""
    columns = EventRow.__table__.c
    selected = [columns[name] for name in EventRecord._fields]
    rows = database.sql(select(*selected).where(columns.task_id == task_id).order_by(columns.id))
    return [EventRecord(*row) for row in rows]
