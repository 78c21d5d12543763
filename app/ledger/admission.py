"""Admits waiting tasks: writes their attempts and notes their wake-up messages, in batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text
from uuid_utils import compat as uuids

from app.ledger import events
from app.ledger.database import Database, sql
from app.models.instance import InstanceMode
from app.models.outcome import WakeUpMessage
from app.models.spec import Mode
from app.models.tables import PAUSED


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A wake-up message with its queue. `host`: the message goes to this host's own part of the queue.

    `about` is for people who look at the messages, in Flower for example: run, task, agent and mode.
    """

    message: WakeUpMessage
    mode: Mode | InstanceMode  # of attempts, or `grading`
    resource_class: str
    host: str | None = None
    about: str = ""


# Tasks that are being cancelled at this moment are locked, and skipped.
_ADMIT = text("""
WITH chosen AS (
    SELECT * FROM unnest(CAST(:tasks AS uuid[]), CAST(:attempts AS uuid[]), CAST(:modes AS text[]),
        CAST(:hosts AS text[])) AS c(task_id, attempt_id, mode, host)
), free AS MATERIALIZED (
    SELECT id, group_started FROM tasks WHERE id = ANY(CAST(:tasks AS uuid[])) AND state = 'pending' AND in_line
        AND cancel_requested_at IS NULL ORDER BY id FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE tasks t SET state = 'admitted', attempts = t.attempts + 1, mode = c.mode, group_started = true
    FROM chosen c JOIN free ON free.id = c.task_id WHERE t.id = c.task_id
    RETURNING t.id AS task_id, t.run_id, t.group_id, t.attempts AS number, t.resource_class, t.user_name,
        t.accepted_at, t.name, t.agent, t.graded_apart, c.attempt_id, c.mode, c.host, free.group_started AS had_started
), dispatched AS (
    INSERT INTO attempts (id, task_id, number, user_name, mode, resource_class, queue_host, graded_apart, phases)
    SELECT attempt_id, task_id, number, user_name, mode, resource_class, host, graded_apart,
           jsonb_build_object('accepted', accepted_at, 'admitted', clock_timestamp())
    FROM moved
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, data)
    SELECT 'attempt.admitted', run_id, task_id, attempt_id, jsonb_build_object('number', number, 'mode', mode)
    FROM moved
)
SELECT moved.attempt_id, moved.number, moved.mode, moved.resource_class, moved.host, moved.run_id, moved.group_id,
    moved.had_started, moved.name, moved.agent, r.name AS run_name
FROM moved LEFT JOIN runs r ON r.id = moved.run_id
""")

_MOST_SIBLINGS = 1000
"""Most siblings marked at a time; in a larger group, the next admitted unmarked sibling marks more."""

_START_GROUPS = text("""
UPDATE tasks SET group_started = true
WHERE id IN (
    SELECT s.id FROM unnest(CAST(:runs AS uuid[]), CAST(:groups AS uuid[])) AS g(run_id, group_id)
    CROSS JOIN LATERAL (
        SELECT t.id FROM tasks t WHERE t.run_id = g.run_id AND t.group_id = g.group_id AND t.state = 'pending'
            AND NOT t.group_started ORDER BY t.id LIMIT :most FOR UPDATE SKIP LOCKED) s)
""")


def admit(
    connection: Connection, choices: Iterable[tuple[UUID, Mode]], hosts: Mapping[UUID, str] | None = None
) -> list[QueuedMessage]:
    """Admits the chosen tasks and writes their next attempts, in one statement; skips tasks that changed meanwhile.

    hosts: preferred hosts; tasks without one may run wherever their mode and class are served. Siblings that still
    wait are marked: a started group goes first within its run.
    """
    pairs = list(choices)
    rows = connection.execute(
        _ADMIT,
        {
            "tasks": [task_id for task_id, _ in pairs],
            "attempts": [uuids.uuid7() for _ in pairs],
            "modes": [mode.value for _, mode in pairs],
            "hosts": [hosts.get(task_id) if hosts else None for task_id, _ in pairs],
        },
    ).all()
    groups = list({(row.run_id, row.group_id) for row in rows if not row.had_started})
    if groups:
        begun = {"runs": [g[0] for g in groups], "groups": [g[1] for g in groups], "most": _MOST_SIBLINGS}
        connection.execute(_START_GROUPS, begun)
    return [_published(row) for row in rows]


_PROMOTE = text("""
WITH due AS (
    SELECT id FROM tasks WHERE state = 'pending' AND NOT in_line AND NOT waits AND available_at <= clock_timestamp()
    ORDER BY available_at LIMIT :limit FOR UPDATE SKIP LOCKED
)
UPDATE tasks t SET in_line = p.name IS NULL,
    available_at = CASE WHEN p.name IS NULL THEN t.available_at ELSE CAST(:paused AS timestamptz) END
FROM due JOIN tasks d ON d.id = due.id LEFT JOIN pauses p ON p.kind = 'run' AND p.name = d.run_id::text
WHERE t.id = due.id RETURNING t.id
""")


def promote(connection: Connection, limit: int) -> int:
    """Queues delayed tasks that are due; those of a paused run wait for its resumption. Returns how many it changed.

    Skips tasks that wait for other tasks until `app.ledger.graphs` has released them.
    """
    return len(connection.execute(_PROMOTE, {"limit": limit, "paused": PAUSED}).all())


def next_due_s(connection: Connection) -> float | None:
    """Returns the seconds until the next delayed task may enter its queue; None: no task is delayed."""
    wait = sql(
        connection,
        "SELECT extract(epoch FROM min(available_at) - clock_timestamp())::float8 FROM tasks"
        " WHERE state = 'pending' AND NOT in_line AND NOT waits",
    ).scalar()
    return None if wait is None else float(wait)


def unpublished(
    connection: Connection, older_than_s: float, limit: int, *, at_host_s: float | None = None
) -> list[QueuedMessage]:
    """Returns unclaimed attempts, for the common queue, not published within the last `older_than_s` seconds.

    at_host_s: the age, in seconds, for attempts in a host's own queue.
    """
    rows = sql(
        connection,
        "SELECT a.id AS attempt_id, a.number, a.mode, a.resource_class, NULL AS host, t.name, t.agent,"
        " r.name AS run_name FROM attempts a JOIN tasks t ON t.id = a.task_id LEFT JOIN runs r ON r.id = t.run_id"
        " WHERE a.state = 'dispatched' AND (a.published_at IS NULL OR a.published_at < clock_timestamp()"
        " - make_interval(secs => CASE WHEN a.queue_host IS NULL THEN :age ELSE :at_host END))"
        " ORDER BY a.dispatched_at LIMIT :limit",
        {"age": older_than_s, "at_host": min(older_than_s, at_host_s or older_than_s), "limit": limit},
    )
    return [_published(row) for row in rows]


def mark_published(connection: Connection, messages: Sequence[QueuedMessage]) -> None:
    """Records that these messages are in the broker, and the host's queue; skips attempts that are being claimed."""
    sql(
        connection,
        "WITH sent AS MATERIALIZED (SELECT a.id, h.host"
        " FROM unnest(CAST(:ids AS uuid[]), CAST(:hosts AS text[])) AS h(id, host) JOIN attempts a ON a.id = h.id"
        " WHERE a.state = 'dispatched' ORDER BY a.id FOR UPDATE OF a SKIP LOCKED)"
        " UPDATE attempts a SET published_at = clock_timestamp(), queue_host = sent.host FROM sent"
        " WHERE a.id = sent.id",
        {"ids": [item.message.attempt_id for item in messages], "hosts": [item.host for item in messages]},
    )


_IN_TURN = text("SELECT pg_advisory_xact_lock(73151)")


def in_turn(connection: Connection) -> None:
    """Takes the lock of one dispatcher pass, until the caller's transaction ends."""
    connection.execute(_IN_TURN)


def give_back(database: Database, message: WakeUpMessage) -> None:
    """Gives back the message of a worker that takes nothing new: the dispatcher sends it again at once."""
    with database.begin() as connection:
        sql(
            connection,
            "UPDATE attempts SET published_at = NULL, queue_host = NULL"
            " WHERE id = :id AND number = :number AND state = 'dispatched'",
            {"id": message.attempt_id, "number": message.number},
        )
        events.wake_dispatcher(connection)


_UNSEAT = text("""
WITH gone AS (
    UPDATE attempts a SET state = 'interrupted', finished_at = clock_timestamp(), end_reason = 'interrupted'
    WHERE a.id IN (
        SELECT id FROM attempts WHERE state = 'dispatched' AND mode = 'persistent'
            AND resource_class = ANY(CAST(:classes AS text[]))
            AND dispatched_at < clock_timestamp() - make_interval(secs => :age) ORDER BY id FOR UPDATE SKIP LOCKED)
    RETURNING a.id, a.task_id
), moved AS (
    UPDATE tasks t SET state = 'pending', in_line = false, available_at = clock_timestamp()
    FROM gone WHERE t.id = gone.task_id AND t.state = 'admitted' RETURNING t.id, t.run_id, gone.id AS attempt_id
)
INSERT INTO events (kind, run_id, task_id, attempt_id) SELECT 'attempt.interrupted', run_id, id, attempt_id FROM moved
""")


def unseat(connection: Connection, classes: Sequence[str], *, older_than_s: float) -> None:
    """Interrupts attempts dispatched to standing pools that are gone, and requeues their tasks; uses up no retry."""
    if classes:
        connection.execute(_UNSEAT, {"classes": list(classes), "age": older_than_s})


def _published(row: Row[Any]) -> QueuedMessage:
    message = WakeUpMessage(attempt_id=row.attempt_id, number=row.number)
    about = f"run={row.run_name or '-'} task={row.name} agent={row.agent} mode={row.mode}"
    return QueuedMessage(message, Mode(row.mode), row.resource_class, row.host, about)
