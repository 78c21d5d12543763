"""Ends runs and tasks whose deadline has passed, as `expired`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import OptionInvalid, SpecInvalid
from app.ledger import events, gradings, results
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.endings import EndReason, RetryPolicy
from app.models.outcome import Failure
from app.models.spec import MOST_WAIT_S

GRACE_S = 30.0
"""An expired attempt that has not stopped this long after the request is taken away from its worker."""

_BATCH = 20_000
_FAILURE = Failure(error="StaleWriter", message="its deadline has passed and its worker did not stop when told to")


def expire(connection: Connection, retry: RetryPolicy) -> list[UUID]:
    """Ends tasks past their deadline: waiting ones at once, running ones by a request; returns the attempts to nudge.

    Waits for no lock: tasks that are being claimed or finished at this moment are checked again the next time.
    """
    due = connection.execute(_DUE, {"batch": _BATCH}).all()
    _end_waiting(connection, due)
    requested = _tell_running(connection, [row for row in due if row.state == "running"])
    return requested + _take_away(connection, retry)


_DUE = text(
    "SELECT id, run_id, state FROM tasks WHERE deadline_at <= clock_timestamp()"
    " AND (state IN ('pending', 'admitted') OR state = 'running' AND cancel_requested_at IS NULL)"
    " ORDER BY deadline_at LIMIT :batch FOR UPDATE SKIP LOCKED"
)


def _end_waiting(connection: Connection, due: Sequence[Row[Any]]) -> None:
    """Ends pending tasks, and admitted ones whose attempt is not being claimed."""
    admitted = [row.id for row in due if row.state == "admitted"]
    stopped = connection.execute(_STOP_DISPATCHED, {"ids": admitted}).all() if admitted else []
    over = {row.id for row in due if row.state == "pending"} | {row.task_id for row in stopped}
    if not over:
        return
    sql(
        connection,
        "UPDATE tasks SET state = 'cancelled', end_reason = 'expired', finished_at = clock_timestamp(),"
        " cancel_requested_at = clock_timestamp(), cancel_reason = 'expired' WHERE id = ANY(:ids)",
        {"ids": list(over)},
    )
    _tell(connection, [row for row in due if row.id in over])
    events.tell_outcome(connection, list(over))
    events.wake_dispatcher(connection)


_STOP_DISPATCHED = text(
    "UPDATE attempts SET state = 'cancelled', finished_at = clock_timestamp(), end_reason = 'expired'"
    " WHERE id IN (SELECT id FROM attempts WHERE task_id = ANY(:ids) AND state = 'dispatched' FOR UPDATE SKIP LOCKED)"
    " RETURNING id, task_id"
)


def _tell_running(connection: Connection, due: Sequence[Row[Any]]) -> list[UUID]:
    if not due:
        return []
    ids = {"ids": [row.id for row in due]}
    sql(
        connection,
        "UPDATE tasks SET cancel_requested_at = clock_timestamp(), cancel_reason = 'expired' WHERE id = ANY(:ids)",
        ids,
    )
    _tell(connection, due)
    running = text("SELECT id FROM attempts WHERE task_id = ANY(:ids) AND state IN ('running', 'grading')")
    return list(connection.execute(running, ids).scalars())


def _take_away(connection: Connection, retry: RetryPolicy) -> list[UUID]:
    """Ends attempts that continue after the cancel request: a hung attempt must not outlive its deadline for long."""
    hung = sql(
        connection,
        "SELECT a.id FROM tasks t JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts"
        " WHERE t.deadline_at <= clock_timestamp() AND t.state = 'running' AND t.cancel_reason = 'expired'"
        " AND t.cancel_requested_at < clock_timestamp() - make_interval(secs => :grace)"
        " AND a.state IN ('running', 'grading') FOR UPDATE OF a SKIP LOCKED",
        {"grace": GRACE_S},
    ).scalars()
    return gradings.take_away(connection, list(hung), _FAILURE, EndReason.EXPIRED, retry)


def _tell(connection: Connection, due: Sequence[Row[Any]]) -> None:
    events.append(connection, *(Fact("task.expired", row.run_id, row.id, data={"was": row.state}) for row in due))


@dataclass(frozen=True, slots=True)
class DeadlineSet:
    """Result of a deadline change: the run, the deadline, and the number of unfinished tasks that it applies to."""

    run_id: UUID
    at: datetime | None
    tasks: int


def set_deadline(database: Database, run: str, at: datetime | None) -> DeadlineSet:
    """Sets, moves or (None) removes the deadline of a run. run: its id, the end of the id, or name. `at` has a zone.

    Raises: UnknownName; AmbiguousName; SpecInvalid: it is not in the future, or the run has ended.
    """
    run_id = results.find(database, "runs", run)
    with database.begin() as connection:
        now: datetime = sql(connection, "SELECT clock_timestamp()").scalar_one()
        if at is not None and not now < at < now + timedelta(seconds=MOST_WAIT_S):
            raise OptionInvalid(
                f"expected a deadline in the future, within ten years, found {at.isoformat()}, now is"
                f" {now.isoformat()}; try a duration such as 2h, or `megaflow cancel {run}`; nothing was changed"
            )
        values = {"id": run_id, "at": at}
        sql(connection, "UPDATE runs SET deadline_at = :at WHERE id = :id", values)
        count = sql(
            connection,
            "WITH mine AS MATERIALIZED (SELECT id FROM tasks WHERE run_id = :id AND cancel_requested_at IS NULL"
            " AND state IN ('pending', 'admitted', 'running') ORDER BY id FOR UPDATE)"
            " UPDATE tasks t SET deadline_at = :at FROM mine WHERE t.id = mine.id",
            values,
        ).rowcount
        if not count:
            raise SpecInvalid(f"expected a run that has not ended, found {run_id} ended; nothing was changed")
        data = {"at": at.isoformat() if at else None, "tasks": count}
        events.append(connection, Fact("run.deadline_set", run_id, data=data))
        events.wake_dispatcher(connection)
    return DeadlineSet(run_id, at, count)
