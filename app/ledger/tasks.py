"""What people do to accepted tasks: cancel them, run again what was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import text

from app.ledger import events
from app.ledger.database import Database
from app.ledger.events import Fact


def cancel(database: Database, task_ids: Sequence[UUID]) -> list[UUID]:
    """Ask for an end. What is not running ends at once; returns the attempts that run and must be told."""
    ids = {"ids": list(task_ids)}
    with database.begin() as connection:
        connection.execute(
            text(
                "UPDATE attempts SET state = 'cancelled', finished_at = clock_timestamp(), end_reason = 'cancelled'"
                " WHERE task_id = ANY(:ids) AND state = 'dispatched'"
            ),
            ids,
        )
        rows = connection.execute(
            text(
                "UPDATE tasks SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp()),"
                " state = CASE WHEN state = 'running' THEN state ELSE 'cancelled' END,"
                " end_reason = CASE WHEN state = 'running' THEN end_reason ELSE 'cancelled' END,"
                " finished_at = CASE WHEN state = 'running' THEN NULL ELSE clock_timestamp() END"
                " WHERE id = ANY(:ids) AND state IN ('pending', 'admitted', 'running') RETURNING id, run_id, state"
            ),
            ids,
        ).all()
        events.append(connection, *(Fact("task.cancel_requested", row.run_id, row.id) for row in rows))
        events.tell_outcome(connection, [row.id for row in rows if row.state != "running"])
        events.wake_dispatcher(connection)
        running = [row.id for row in rows if row.state == "running"]
        return list(
            connection.execute(
                text("SELECT id FROM attempts WHERE task_id = ANY(:ids) AND state = 'running'"), {"ids": running}
            ).scalars()
        )


def retry(database: Database, task_ids: Sequence[UUID]) -> list[UUID]:
    """Put tasks that failed or were cancelled back in line with a full set of retries; returns those moved."""
    with database.begin() as connection:
        rows = connection.execute(
            text(
                "UPDATE tasks SET state = 'pending', faults = 0, cancel_requested_at = NULL, finished_at = NULL,"
                " end_reason = NULL, failure = NULL, available_at = clock_timestamp()"
                " WHERE id = ANY(:ids) AND state IN ('failed', 'cancelled') RETURNING id, run_id"
            ),
            {"ids": list(task_ids)},
        ).all()
        events.append(connection, *(Fact("task.reopened", row.run_id, row.id) for row in rows))
        events.wake_dispatcher(connection)
        return [row.id for row in rows]
