"""Cancels tasks, ends those past their deadline, and retries those that were not scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection, text

from app.ledger import admission, events, gradings, graphs
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.endings import EndReason, RetryPolicy
from app.models.outcome import Failure

GRACE_S = 30.0
"""An expired attempt that has not stopped this long after the request is taken away from its worker."""

_ROUNDS = 5
_ROUND_S = 0.02
_BATCH = 20_000
_KINDS = {EndReason.SUPERSEDED: "task.superseded", EndReason.EXPIRED: "task.expired"}
_OVERDUE = Failure(error="StaleWriter", message="its deadline has passed and its worker did not stop when told to")


def cancel(database: Database, task_ids: Sequence[UUID]) -> list[UUID]:
    """Requests the end of tasks and of those that wait for them. Tasks that do not run end at once; returns the running
    attempts, whose workers must be notified."""
    notify: list[UUID] = []
    left = list(task_ids)
    for _ in range(_ROUNDS):
        running, left = _cancel(database, left)
        notify += running
        if not left:
            break
        time.sleep(_ROUND_S)  # these are being claimed at this moment
    return notify


def _cancel(database: Database, task_ids: Sequence[UUID]) -> tuple[list[UUID], list[UUID]]:
    with database.begin() as connection:
        below = graphs.downstream(connection, task_ids)
        answer = end(connection, [*task_ids, *below], EndReason.CANCELLED)
        if below:
            graphs.say_why(connection, below)
        return answer


def end(connection: Connection, task_ids: Sequence[UUID], reason: EndReason) -> tuple[list[UUID], list[UUID]]:
    """Ends tasks in one round; returns the running attempts to notify, and the tasks that are being claimed right now.

    The first reason of a task stays. The tasks are locked first, so that none is admitted meanwhile. A claim locks its
    attempt and then its task: a locked attempt is being claimed and is skipped, so that there is no deadlock.
    """
    values = {"ids": list(task_ids), "reason": reason.value}
    connection.execute(_LOCK, values)
    connection.execute(_CANCEL_ATTEMPTS, values)
    rows = connection.execute(_CANCEL_TASKS, values).all()
    kind = _KINDS.get(reason, "task.cancel_requested")
    events.append(connection, *(Fact(kind, row.run_id, row.id) for row in rows))
    events.tell_outcome(connection, [row.id for row in rows if row.state == "cancelled"])
    events.wake_dispatcher(connection)
    running = [row.id for row in rows if row.state == "running"]
    attempt_ids = sql(
        connection,
        "SELECT id FROM attempts WHERE task_id = ANY(:ids) AND state IN ('running', 'grading')",
        {"ids": running},
    )
    return list(attempt_ids.scalars()), [row.id for row in rows if row.state == "admitted"]


_LOCK = text("SELECT 1 FROM tasks WHERE id = ANY(:ids) ORDER BY id FOR UPDATE")
_CANCEL_ATTEMPTS = text(
    "WITH free AS MATERIALIZED (SELECT id FROM attempts WHERE task_id = ANY(:ids)"
    " AND (state = 'dispatched' OR state = 'grading' AND deadline_at IS NULL) ORDER BY id FOR UPDATE SKIP LOCKED),"
    " graded AS (DELETE FROM gradings g USING free WHERE g.attempt_id = free.id)"
    " UPDATE attempts a SET state = 'cancelled', finished_at = clock_timestamp(),"
    " end_reason = (SELECT coalesce(t.cancel_reason, :reason) FROM tasks t WHERE t.id = a.task_id),"
    " phases = a.phases || CASE state WHEN 'grading' THEN jsonb_build_object('torn_down', clock_timestamp())"
    " ELSE '{}' END FROM free WHERE a.id = free.id"
)
_CANCEL_TASKS = text("""
WITH asked AS (
    SELECT t.id, EXISTS (SELECT 1 FROM attempts a WHERE a.task_id = t.id
        AND a.state IN ('dispatched', 'running', 'grading')) AS live
    FROM tasks t WHERE t.id = ANY(:ids) AND t.state IN ('pending', 'admitted', 'running')
)
UPDATE tasks t SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp()),
    cancel_reason = coalesce(cancel_reason, :reason),
    state = CASE WHEN asked.live THEN t.state ELSE 'cancelled' END,
    end_reason = CASE WHEN asked.live THEN t.end_reason ELSE coalesce(cancel_reason, :reason) END,
    finished_at = CASE WHEN asked.live THEN NULL ELSE clock_timestamp() END
FROM asked WHERE t.id = asked.id RETURNING t.id, t.run_id, t.state
""")


def expire(connection: Connection, retry: RetryPolicy) -> list[UUID]:
    """Ends tasks past their deadline: waiting ones at once, running ones by a request; returns the attempts to nudge.

    Waits for no lock: tasks that are locked at this moment are looked at the next time.
    """
    due = list(sql(connection, _DUE, {"batch": _BATCH}).scalars())
    running = end(connection, due, EndReason.EXPIRED)[0] if due else []
    hung = sql(connection, _HUNG, {"grace": GRACE_S}).scalars()
    return running + gradings.take_away(connection, list(hung), _OVERDUE, EndReason.EXPIRED, retry)


_DUE = """
SELECT id FROM tasks WHERE deadline_at <= clock_timestamp() AND cancel_requested_at IS NULL
    AND state IN ('pending', 'admitted', 'running') ORDER BY deadline_at LIMIT :batch FOR UPDATE SKIP LOCKED
"""
_HUNG = """
SELECT a.id FROM tasks t JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
WHERE t.deadline_at <= clock_timestamp() AND t.state = 'running' AND t.cancel_reason = 'expired'
    AND t.cancel_requested_at < clock_timestamp() - make_interval(secs => :grace)
    AND a.state IN ('running', 'grading') FOR UPDATE OF a SKIP LOCKED
"""


def settle_cancelled(database: Database) -> list[UUID]:
    """Ends tasks whose cancellation was requested during a claim that did not succeed; and those that were to stop by a
    deadline, or while they were queued for grading."""
    task_ids = list(database.sql(_UNSETTLED).scalars())
    return cancel(database, task_ids) if task_ids else []


# An array, because a join reads all tasks when the planner overestimates the unclaimed attempts.
_UNSETTLED = text(
    "SELECT id FROM tasks WHERE id = ANY(ARRAY(SELECT task_id FROM attempts WHERE state = 'dispatched'))"
    " AND state = 'admitted' AND cancel_requested_at IS NOT NULL UNION ALL"
    " SELECT t.id FROM gradings g JOIN attempts a ON a.id = g.attempt_id JOIN tasks t ON t.id = a.task_id"
    " WHERE g.instance_id IS NULL AND t.cancel_requested_at IS NOT NULL"
)


def retry(database: Database, task_ids: Sequence[UUID]) -> list[UUID]:
    """Puts failed or cancelled tasks back in line with a full set of retries; returns those moved.

    Superseded tasks stay: their group is complete. So do those that come after a failed or cancelled task: retry that
    one first.
    """
    with database.begin() as connection:
        if graphs.concerned(connection, task_ids):
            admission.in_turn(connection)  # else a task's dependency may be settled before the task waits
        connection.execute(_REOPEN_GROUPS, {"ids": list(task_ids)})  # a group is locked before its tasks
        rows = connection.execute(_REOPEN, {"ids": list(task_ids)}).all()
        events.append(connection, *(Fact("task.reopened", row.run_id, row.id) for row in rows))
        events.wake_dispatcher(connection)
        return [row.id for row in rows]


_REOPEN_GROUPS = text("""
WITH lost AS MATERIALIZED (
    SELECT group_id FROM experience_groups WHERE state = 'lost' AND group_id IN (SELECT group_id FROM tasks t
        WHERE id = ANY(CAST(:ids AS uuid[])) AND state IN ('failed', 'cancelled')
            AND end_reason IS DISTINCT FROM 'superseded' AND NOT EXISTS (SELECT FROM task_dependencies d
                JOIN tasks u ON u.id = d.on_task WHERE d.run_id = t.run_id AND u.state IN ('failed', 'cancelled')))
    ORDER BY group_id FOR UPDATE
)
UPDATE experience_groups g SET state = 'open', closed_at = NULL, detail = '' FROM lost WHERE g.group_id = lost.group_id
""")
_REOPEN = text("""
WITH ended AS MATERIALIZED (
    SELECT id FROM tasks t WHERE id = ANY(CAST(:ids AS uuid[])) AND state IN ('failed', 'cancelled')
        AND end_reason IS DISTINCT FROM 'superseded' AND NOT EXISTS (SELECT FROM task_dependencies d
            JOIN tasks u ON u.id = d.on_task WHERE d.run_id = t.run_id AND u.state IN ('failed', 'cancelled'))
    ORDER BY id FOR UPDATE OF t
)
UPDATE tasks t SET state = 'pending', faults = 0, cancel_requested_at = NULL, cancel_reason = NULL, finished_at = NULL,
    end_reason = NULL, failure = NULL, in_line = false, available_at = clock_timestamp(),
    waits = EXISTS (SELECT FROM task_dependencies d JOIN tasks u ON u.id = d.on_task
        WHERE d.run_id = t.run_id AND u.state <> 'succeeded'),
    has_dependents = EXISTS (SELECT FROM task_dependencies d WHERE d.on_task = t.id),
    deadline_at = CASE WHEN deadline_at > clock_timestamp() THEN deadline_at END
FROM ended WHERE t.id = ended.id RETURNING t.id, t.run_id
""")
