"""Makes runs wait for other tasks: no task of such a run begins before all its upstream tasks have succeeded.

`tasks.waits` keeps a run's tasks out of the queue, whatever pauses and delays do to `in_line` and `available_at`: a
constraint of the table. `add` marks the upstream tasks (`has_dependents`) on their locked rows. Whichever way a marked
task ends, an index lists it from that commit on. `settle`, in the dispatcher's pass, reads only that index: it releases
or cancels the waiting tasks, and removes the mark. It locks ended tasks first and reads the waiting tasks then. One
`settle` runs at a time (`admission.in_turn`) and waits for no lock: locked tasks keep their mark until the next pass.
So an end takes no locks but its own, and no order of ends can block another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row, text
from sqlalchemy.dialects.postgresql import insert

from app.errors import IdempotencyConflict, UnknownName
from app.ledger import admission, events
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.graphs import UPSTREAM_NOT_SUCCEEDED, ComesAfter
from app.models.outcome import ArtifactKind
from app.models.service_tables import TaskDependencyRow

_ENDED_AT_ONCE = 500
_ROUNDS = 20
"""Most levels of a graph that a failure passes down in one pass; the next pass continues."""


def check(connection: Connection, user_name: str, upstream: ComesAfter) -> None:
    """Raises: UnknownName: a task that is unknown, or not the user's."""
    known = sql(
        connection,
        "SELECT id FROM tasks WHERE id = ANY(CAST(:ids AS uuid[])) AND user_name = :user",
        {"ids": list(upstream.all), "user": user_name},
    ).scalars()
    if missing := upstream.all - set(known):
        raise UnknownName(
            f"expected tasks of user {user_name!r} to come after, found {len(missing)} that are not,"
            f" e.g. {min(missing)}; nothing was submitted"
        )


_MARK = text(
    "WITH upstream AS MATERIALIZED (SELECT id FROM tasks WHERE id = ANY(CAST(:ids AS uuid[])) ORDER BY id"
    " FOR NO KEY UPDATE) UPDATE tasks t SET has_dependents = true FROM upstream u WHERE t.id = u.id"
)


def add(connection: Connection, run_id: UUID, upstream: ComesAfter) -> None:
    """Stores the upstream tasks of a new run, whose tasks are written with `waits`. Locks them until the commit.

    Upstream tasks that have ended already are marked, too: the next pass releases or cancels the run's tasks as usual.
    """
    rows = [
        {"run_id": run_id, "on_task": task_id, "path": path, "kind": kind} for task_id, path, kind in upstream.rows()
    ]
    connection.execute(
        _MARK, {"ids": list(upstream.all)}
    )  # first, in order: inserting the rows locks them, too (foreign keys)
    connection.execute(insert(TaskDependencyRow), rows)


def check_same(connection: Connection, run_id: UUID, upstream: ComesAfter, key: str | None) -> None:
    """Raises: IdempotencyConflict: the run with this key has other upstream tasks or inputs."""
    statement = "SELECT on_task, path, kind FROM task_dependencies WHERE run_id = :run"
    if {tuple(row) for row in sql(connection, statement, {"run": run_id})} != upstream.rows():
        raise IdempotencyConflict(
            f"idempotency key {key!r} was used by run {run_id}, which comes after other tasks or has other inputs;"
            f" expected the same again or a new key"
        )


_ENDED = text(
    "SELECT id, state FROM tasks WHERE has_dependents AND state IN ('succeeded', 'failed', 'cancelled')"
    " ORDER BY id LIMIT :most FOR NO KEY UPDATE SKIP LOCKED"
)
# Checks each run separately, up to its first upstream task that has not succeeded: there may be a thousand.
_READY = text("""
WITH later AS MATERIALIZED (SELECT DISTINCT run_id FROM task_dependencies WHERE on_task = ANY(CAST(:ids AS uuid[])))
SELECT l.run_id FROM later l WHERE (
    SELECT count(*) FROM (SELECT FROM task_dependencies o JOIN tasks u ON u.id = o.on_task
        WHERE o.run_id = l.run_id AND u.state <> 'succeeded' LIMIT 1) going) = 0
""")
_RELEASE = text("""
WITH free AS MATERIALIZED (
    SELECT id FROM tasks WHERE run_id = ANY(CAST(:runs AS uuid[])) AND state = 'pending' AND waits
    LIMIT :most FOR UPDATE SKIP LOCKED
)
UPDATE tasks t SET waits = false FROM free WHERE t.id = free.id RETURNING t.id, t.run_id
""")
# A failure as JSON; `u` is the upstream task that did not succeed.
_WHY = f"""jsonb_build_object('error', '{UPSTREAM_NOT_SUCCEEDED}', 'message', 'task ' || u.name || ' (' || u.id
    || '), after which it comes, ' || CASE WHEN u.state IN ('failed', 'cancelled')
        THEN 'ended as ' || u.state || coalesce(' (' || u.end_reason || ')', '') ELSE 'is being cancelled' END)"""
_CANCEL = text(f"""
WITH free AS MATERIALIZED (
    SELECT t.id, d.on_task FROM task_dependencies d JOIN tasks t ON t.run_id = d.run_id
    WHERE d.on_task = ANY(CAST(:ids AS uuid[])) AND t.state = 'pending' AND t.waits
    LIMIT :most FOR UPDATE OF t SKIP LOCKED
)
UPDATE tasks t SET state = 'cancelled', end_reason = 'cancelled', finished_at = clock_timestamp(),
    cancel_requested_at = clock_timestamp(), cancel_reason = 'cancelled', failure = {_WHY}
FROM free JOIN tasks u ON u.id = free.on_task WHERE t.id = free.id
RETURNING t.id, t.run_id, free.on_task, t.failure->>'message' AS why
""")  # noqa: S608
# Keeps the mark while dependents are left that were locked or above the limit. A run that waits for further tasks needs
# no mark here: the last of those to end releases it.
_SEEN_TO = text("""
WITH left_over AS MATERIALIZED (
    SELECT DISTINCT run_id FROM tasks WHERE run_id = ANY(CAST(:runs AS uuid[])) AND state = 'pending' AND waits
)
UPDATE tasks e SET has_dependents = false WHERE e.id = ANY(CAST(:ids AS uuid[])) AND CASE e.state
    WHEN 'succeeded' THEN NOT EXISTS (
        SELECT FROM task_dependencies d WHERE d.on_task = e.id AND d.run_id IN (SELECT run_id FROM left_over))
    ELSE NOT EXISTS (
        SELECT FROM task_dependencies d JOIN tasks t ON t.run_id = d.run_id
        WHERE d.on_task = e.id AND t.state = 'pending' AND t.waits) END
""")


def settle(connection: Connection, most: int) -> int:
    """Releases or cancels tasks whose upstream tasks have ended, about `most` at most; returns their number.

    The caller holds `admission.in_turn`. Cancelled tasks may have dependents of their own: later rounds cancel these.
    """
    settled = 0
    for _ in range(_ROUNDS):
        ended = connection.execute(_ENDED, {"most": _ENDED_AT_ONCE}).all()
        if not ended:
            return settled
        moved = _settle(connection, ended, most - settled)
        settled += moved
        if (not moved and len(ended) < _ENDED_AT_ONCE) or settled >= most:
            break
    if settled:
        events.wake_dispatcher(connection)  # there may be more
    return settled


def _settle(connection: Connection, ended: Sequence[Row[Any]], most: int) -> int:
    succeeded = [row.id for row in ended if row.state == "succeeded"]
    over = [row.id for row in ended if row.state != "succeeded"]
    ready = list(connection.execute(_READY, {"ids": succeeded}).scalars()) if succeeded else []
    released = connection.execute(_RELEASE, {"runs": ready, "most": most}).all() if ready else []
    cancelled = connection.execute(_CANCEL, {"ids": over, "most": most}).all() if over else []
    connection.execute(_SEEN_TO, {"ids": succeeded + over, "runs": ready})
    events.append(connection, *(Fact("task.released", row.run_id, row.id) for row in released))
    _tell_cancelled(connection, cancelled)
    events.tell_outcome(connection, [row.id for row in cancelled])
    return len(released) + len(cancelled)


def _tell_cancelled(connection: Connection, rows: Sequence[Row[Any]]) -> None:
    facts = (
        Fact("task.upstream_ended", row.run_id, row.id, data={"after": str(row.on_task), "why": row.why})
        for row in rows
    )
    events.append(connection, *facts)


_LOST = text(
    "UPDATE tasks t SET has_dependents = true WHERE t.id IN (SELECT d.on_task FROM tasks w JOIN task_dependencies d"
    " ON d.run_id = w.run_id WHERE w.id = ANY(CAST(:ids AS uuid[])))"
)
_WAIT_FOR_NOTHING = text(
    "UPDATE tasks t SET waits = false WHERE t.id = ANY(CAST(:ids AS uuid[])) AND t.state = 'pending' AND t.waits"
    " AND NOT EXISTS (SELECT FROM task_dependencies d WHERE d.run_id = t.run_id) RETURNING t.id, t.run_id"
)


def look_again(database: Database, task_ids: Sequence[UUID]) -> int:
    """Checks the upstream of these tasks as if it had just ended; returns how many tasks it released or cancelled."""
    values = {"ids": list(task_ids)}
    with database.begin() as connection:
        admission.in_turn(connection)
        connection.execute(_LOST, values)
        free = connection.execute(_WAIT_FOR_NOTHING, values).all()
        events.append(connection, *(Fact("task.released", row.run_id, row.id) for row in free))
        events.wake_dispatcher(connection)
        return len(free) + settle(connection, max(1, len(task_ids)))


# Runs before the cancellation is requested: tasks that have ended by themselves are no roots.
_DOWNSTREAM = text("""
WITH RECURSIVE below AS (
    SELECT id FROM tasks WHERE id = ANY(CAST(:ids AS uuid[])) AND has_dependents
        AND state IN ('pending', 'admitted', 'running')
    UNION
    SELECT t.id FROM below b JOIN task_dependencies d ON d.on_task = b.id JOIN tasks t ON t.run_id = d.run_id
    WHERE t.state = 'pending' AND t.waits
)
SELECT id FROM below WHERE id <> ALL(CAST(:ids AS uuid[]))
""")
_SAY_WHY = text(f"""
WITH why AS (
    SELECT DISTINCT ON (t.id) t.id, u.id AS on_task FROM tasks t JOIN task_dependencies d ON d.run_id = t.run_id
    JOIN tasks u ON u.id = d.on_task AND (u.cancel_requested_at IS NOT NULL OR u.state IN ('failed', 'cancelled'))
    WHERE t.id = ANY(CAST(:ids AS uuid[])) AND t.state = 'cancelled' AND t.waits AND t.failure IS NULL
    ORDER BY t.id, u.id
)
UPDATE tasks t SET failure = {_WHY} FROM why JOIN tasks u ON u.id = why.on_task WHERE t.id = why.id
RETURNING t.id, t.run_id, why.on_task, t.failure->>'message' AS why
""")  # noqa: S608


def downstream(connection: Connection, task_ids: Sequence[UUID]) -> list[UUID]:
    """Returns the tasks that depend on any of these, directly or not, without the given tasks."""
    return list(connection.execute(_DOWNSTREAM, {"ids": list(task_ids)}).scalars())


def say_why(connection: Connection, task_ids: Sequence[UUID]) -> None:
    """Records which upstream task was the reason for the cancellation of each of these tasks."""
    _tell_cancelled(connection, connection.execute(_SAY_WHY, {"ids": list(task_ids)}).all())


def concerned(connection: Connection, task_ids: Sequence[UUID]) -> bool:
    """Whether any of these tasks depends on another task or has dependents."""
    return bool(
        sql(
            connection,
            "SELECT EXISTS (SELECT FROM task_dependencies) AND"
            " (EXISTS (SELECT FROM task_dependencies WHERE on_task = ANY(CAST(:ids AS uuid[]))) OR EXISTS (SELECT"
            " FROM tasks t JOIN task_dependencies d ON d.run_id = t.run_id WHERE t.id = ANY(CAST(:ids AS uuid[]))))",
            {"ids": list(task_ids)},
        ).scalar()
    )


class WaitedFor(NamedTuple):
    """The first upstream task that a run waits for, and `tasks`, the number of all that it waits for."""

    task_id: UUID
    name: str
    state: str
    tasks: int


def waits_for(connection: Connection, run_id: UUID) -> WaitedFor | None:
    """Returns the first task that the run waits for, with the count of such tasks; None: all have succeeded."""
    row = sql(
        connection,
        "SELECT u.id, u.name, u.state, count(*) OVER () AS tasks FROM (SELECT DISTINCT on_task"
        " FROM task_dependencies WHERE run_id = :run) d JOIN tasks u ON u.id = d.on_task"
        " WHERE u.state <> 'succeeded' ORDER BY u.id LIMIT 1",
        {"run": run_id},
    ).first()
    return None if row is None else WaitedFor(*row)


class TaskInput(NamedTuple):
    """An artifact of an upstream task, and its path in the environment. `key` None: none; `missing` is the reason."""

    path: str
    kind: ArtifactKind
    task_id: UUID
    task_name: str
    key: str | None
    missing: str | None


def inputs(database: Database, run_id: UUID) -> list[TaskInput]:
    """Returns the input files that each task of a run gets, ordered by path. Raises: DatabaseUnavailable."""
    rows = database.sql(
        "SELECT d.path, d.kind, u.id, u.name, f.key, f.missing FROM task_dependencies d"
        " JOIN tasks u ON u.id = d.on_task LEFT JOIN attempts a ON a.task_id = u.id AND a.number = u.attempts"
        " LEFT JOIN artifacts f ON f.attempt_id = a.id AND f.kind = d.kind"
        " WHERE d.run_id = :run AND d.path <> '' ORDER BY d.path",
        {"run": run_id},
    )
    return [TaskInput(row[0], ArtifactKind(row[1]), *row[2:]) for row in rows]
