"""Ends runs and tasks whose deadline has passed, as `expired`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import AmbiguousName, SpecInvalid, UnknownName
from app.ledger import ends, events, results
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.endings import EndReason, RetryPolicy
from app.models.outcome import Failure

GRACE_S = 30.0
"""An expired attempt that has not stopped this long after the request is taken away from its worker."""

_BATCH = 20_000
_FAILURE = Failure(error="StaleWriter", message="its deadline has passed and its worker did not stop when told to")


def expire(connection: Connection, retry: RetryPolicy) -> list[UUID]:
    """End what is past its deadline: what waits at once, what runs by telling it; returns the attempts to nudge.

    Waits for no lock: what is being claimed or finished at this moment is looked at again the next time.
    """
    due = connection.execute(_DUE, {"batch": _BATCH}).all()
    _end_waiting(connection, due)
    told = _tell_running(connection, [row for row in due if row.state == "running"])
    return told + _take_away(connection, retry)


_DUE = text(
    "SELECT id, run_id, state FROM tasks WHERE deadline_at <= clock_timestamp()"
    " AND (state IN ('pending', 'admitted') OR state = 'running' AND cancel_requested_at IS NULL)"
    " ORDER BY deadline_at LIMIT :batch FOR UPDATE SKIP LOCKED"
)


def _end_waiting(connection: Connection, due: Sequence[Row[Any]]) -> None:
    """Pending tasks, and admitted ones whose attempt is not being claimed."""
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
    running = text("SELECT id FROM attempts WHERE task_id = ANY(:ids) AND state = 'running'")
    return list(connection.execute(running, ids).scalars())


def _take_away(connection: Connection, retry: RetryPolicy) -> list[UUID]:
    """Attempts whose worker was told and goes on: a hung one must not outlive the deadline for long."""
    hung = sql(
        connection,
        "SELECT a.id FROM tasks t JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts"
        " WHERE t.deadline_at <= clock_timestamp() AND t.state = 'running' AND t.cancel_reason = 'expired'"
        " AND t.cancel_requested_at < clock_timestamp() - make_interval(secs => :grace)"
        " AND a.state = 'running' FOR UPDATE SKIP LOCKED",
        {"grace": GRACE_S},
    ).scalars()
    return ends.lose(connection, list(hung), _FAILURE, EndReason.EXPIRED, retry)


def _tell(connection: Connection, due: Sequence[Row[Any]]) -> None:
    events.append(connection, *(Fact("task.expired", row.run_id, row.id, data={"was": row.state}) for row in due))


# --- Setting one ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadlineSet:
    """What has a new deadline: a run or one task, and how many tasks that are left end by it."""

    kind: str  # run | task
    id: UUID
    at: datetime | None
    tasks: int


def set_deadline(database: Database, run_or_task: str, at: datetime | None) -> DeadlineSet:
    """Give a run or a task (its id or the end of it; a run's name) a deadline, move it, or with None take it away.

    A run's deadline reaches those of its tasks that have none of their own, or a later one.

    Raises: UnknownName; AmbiguousName; SpecInvalid: it is not in the future, or nothing is left to end: unchanged.
    """
    if at is not None and at.tzinfo is None:
        raise SpecInvalid(f"expected a time with its zone, found {at.isoformat()}; try {at.isoformat()}Z")
    kind, found = _find(database, run_or_task)
    with database.begin() as connection:
        now: datetime = sql(connection, "SELECT clock_timestamp()").scalar_one()
        if at is not None and at <= now:
            raise SpecInvalid(
                f"expected a deadline in the future, found {at.isoformat()}, now is {now.isoformat()};"
                f" try a duration such as 2h, or `megaflow cancel {run_or_task}`; nothing was changed"
            )
        count = _of_run(connection, found, at) if kind == "run" else _of_task(connection, found, at)
        if not count:
            raise SpecInvalid(f"expected a {kind} that has not ended, found {found} ended; nothing was changed")
        data = {"at": at.isoformat() if at else None, "tasks": count}
        task_id = None if kind == "run" else found
        events.append(connection, Fact(f"{kind}.deadline_set", _run_of(connection, found), task_id, data=data))
        events.wake_dispatcher(connection)
    return DeadlineSet(kind, found, at, count)


def _find(database: Database, run_or_task: str) -> tuple[str, UUID]:
    try:
        return "run", results.find(database, "runs", run_or_task)
    except AmbiguousName:
        raise
    except UnknownName:
        return "task", results.find(database, "tasks", run_or_task)


def _run_of(connection: Connection, run_or_task: UUID) -> UUID:
    run_id = sql(connection, "SELECT run_id FROM tasks WHERE id = :id", {"id": run_or_task}).scalar()
    return run_or_task if run_id is None else UUID(str(run_id))


def _of_run(connection: Connection, run_id: UUID, at: datetime | None) -> int:
    old = sql(connection, "SELECT deadline_at FROM runs WHERE id = :id FOR UPDATE", {"id": run_id}).scalar()
    sql(connection, "UPDATE runs SET deadline_at = :at WHERE id = :id", {"id": run_id, "at": at})
    # A task that has the run's old deadline follows; one with an earlier one of its own keeps that.
    moved = sql(
        connection,
        "UPDATE tasks SET deadline_at = CASE"
        " WHEN deadline_at IS NULL OR deadline_at = CAST(:old AS timestamptz) THEN CAST(:at AS timestamptz)"
        " ELSE least(deadline_at, CAST(:at AS timestamptz)) END"
        " WHERE run_id = :id AND state IN ('pending', 'admitted', 'running') AND cancel_requested_at IS NULL",
        {"id": run_id, "old": old, "at": at},
    )
    return moved.rowcount


def _of_task(connection: Connection, task_id: UUID, at: datetime | None) -> int:
    bound = sql(
        connection, "SELECT r.deadline_at FROM tasks t JOIN runs r ON r.id = t.run_id WHERE t.id = :id", {"id": task_id}
    ).scalar()
    if at is not None and bound is not None and at > bound:
        raise SpecInvalid(
            f"expected a deadline not after the run's, {bound.isoformat()}, found {at.isoformat()};"
            f" move the run's first; nothing was changed"
        )
    moved = sql(
        connection,
        "UPDATE tasks SET deadline_at = :at WHERE id = :id AND state IN ('pending', 'admitted', 'running')"
        " AND cancel_requested_at IS NULL",
        {"id": task_id, "at": bound if at is None else at},
    )
    return moved.rowcount
