"""Reads waiting tasks and free capacity, for the dispatcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from app.ledger import gradings, staleness
from app.ledger.database import sql
from app.ledger.staleness import PolicyBound
from app.models.endings import EndReason, RetryPolicy
from app.models.instance import InstanceMode
from app.models.outcome import Failure
from app.models.spec import Mode

Key = tuple[Mode, str]
"""A mode and a resource class."""


class QueueKey(NamedTuple):
    """Key of a queue: the tasks of a user that request this mode and class."""

    mode: Mode  # as requested; may be AUTO
    resource_class: str
    user_name: str


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """A task that may be admitted now."""

    task_id: UUID
    priority: int
    run_id: UUID  # later runs have higher ids
    again: bool = False  # it has had an attempt before
    model: str | None = None


# A loose index scan: one probe per queue, for any number of tasks in it.
_LINES = text("""
WITH RECURSIVE lines AS (
    (SELECT requested_mode, resource_class, user_name FROM tasks WHERE state = 'pending' AND in_line
     ORDER BY requested_mode, resource_class, user_name LIMIT 1)
    UNION ALL
    SELECT n.* FROM lines l CROSS JOIN LATERAL (
        SELECT requested_mode, resource_class, user_name FROM tasks WHERE state = 'pending' AND in_line
            AND (requested_mode, resource_class, user_name) > (l.requested_mode, l.resource_class, l.user_name)
        ORDER BY requested_mode, resource_class, user_name LIMIT 1) n
)
SELECT * FROM lines
""")


def queues(connection: Connection) -> list[QueueKey]:
    """Returns the queues that have tasks."""
    return [QueueKey(Mode(row[0]), row[1], row[2]) for row in connection.execute(_LINES)]


_HEADS = text("""
SELECT l.ord, c.id, c.priority, c.run_id, c.again, c.model
FROM unnest(CAST(:modes AS text[]), CAST(:classes AS text[]), CAST(:users AS text[]), CAST(:takes AS int[]))
    WITH ORDINALITY AS l(mode, resource_class, user_name, take, ord)
CROSS JOIN LATERAL (
    SELECT id, priority, run_id, group_started, attempts > 0 AS again, model FROM tasks
    WHERE state = 'pending' AND in_line AND requested_mode = l.mode AND resource_class = l.resource_class
        AND user_name = l.user_name AND NOT (bounded AND run_id = ANY(CAST(:full AS uuid[])))
        AND (model IS NULL OR model <> ALL(CAST(:full_models AS text[])))
    ORDER BY priority DESC, (attempts > 0) DESC, run_id, group_started DESC, id LIMIT l.take) c
ORDER BY l.ord, c.priority DESC, c.again DESC, c.run_id, c.group_started DESC, c.id
""")


def heads(
    connection: Connection,
    wanted: Sequence[tuple[QueueKey, int]],
    full: Iterable[UUID] = (),
    full_models: Iterable[str] = (),
) -> dict[QueueKey, list[WaitingTask]]:
    """Returns the first tasks of each queue, by priority, tasks with earlier attempts, run, started groups and arrival.

    full: bounded runs whose tasks are skipped; full_models: models whose tasks are skipped.
    """
    if not wanted:
        return {}
    values = {
        "modes": [queue.mode.value for queue, _ in wanted],
        "classes": [queue.resource_class for queue, _ in wanted],
        "users": [queue.user_name for queue, _ in wanted],
        "takes": [take for _, take in wanted],
        "full": list(full),
        "full_models": list(full_models),
    }
    tasks: dict[QueueKey, list[WaitingTask]] = {queue: [] for queue, _ in wanted}
    for row in connection.execute(_HEADS, values):
        tasks[wanted[row.ord - 1][0]].append(WaitingTask(*row[1:]))
    return tasks


@dataclass(frozen=True, slots=True)
class BoundedRun:
    """A run with a bound on its attempts at once or on its policy, and a queue that holds its tasks."""

    run_id: UUID
    queue: QueueKey
    live: int  # attempts, over all its queues
    max_running: int | None
    policy: PolicyBound | None = None

    @property
    def room(self) -> int:
        rooms = [] if self.max_running is None else [max(0, self.max_running - self.live)]
        return min([*rooms, self.policy.room] if self.policy else rooms, default=_NO_BOUND)

    @property
    def limit(self) -> str:
        waits = self.policy is not None and not self.policy.room
        return policy_limit(self.run_id) if waits else run_limit(self.run_id)


def run_limit(run_id: UUID) -> str:
    """Returns the name of the limit for a run's bound on its attempts at once."""
    return f"{RUN_LIMIT}{run_id}"


def policy_limit(run_id: UUID) -> str:
    """Returns the name of the limit for the wait for a new version of a run's policy."""
    return f"{run_limit(run_id)}:policy"


RUN_LIMIT = "quota:run:"
_NO_BOUND = 1_000_000
"""Room, in tasks, of a run whose trainer has not reported its batch size yet."""

# A loose index scan as in `_LINES`: one probe per waiting bounded run, for any number of its tasks.
_BOUNDED = text("""
WITH RECURSIVE found AS (
    (SELECT run_id, requested_mode, resource_class, user_name FROM tasks WHERE bounded AND state = 'pending' AND in_line
     ORDER BY run_id, requested_mode, resource_class, user_name LIMIT 1)
    UNION ALL
    SELECT n.* FROM found f CROSS JOIN LATERAL (
        SELECT run_id, requested_mode, resource_class, user_name FROM tasks
        WHERE bounded AND state = 'pending' AND in_line AND (run_id, requested_mode, resource_class, user_name)
            > (f.run_id, f.requested_mode, f.resource_class, f.user_name)
        ORDER BY run_id, requested_mode, resource_class, user_name LIMIT 1) n
)
SELECT f.*, r.max_running, (SELECT count(*) FROM tasks t WHERE t.bounded AND t.state IN ('admitted', 'running')
    AND t.run_id = f.run_id) AS live, (e.max_staleness + 1) * e.batch_groups AS most
FROM found f JOIN runs r ON r.id = f.run_id LEFT JOIN experience_runs e ON e.run_id = f.run_id
""")


def bounded_runs(connection: Connection) -> list[BoundedRun]:
    """Returns the bounded runs whose tasks wait, once for each of their queues."""
    rows = connection.execute(_BOUNDED).all()
    policies: dict[UUID, PolicyBound] = {}
    for row in rows:
        if row.most is not None and row.run_id not in policies:
            policies[row.run_id] = staleness.policy_bound(connection, row.run_id, row.most)
    return [
        BoundedRun(
            row.run_id, QueueKey(Mode(row[1]), row[2], row[3]), row.live, row.max_running, policies.get(row.run_id)
        )
        for row in rows
    ]


_BACKLOGS = text("""
SELECT l.ord, (SELECT count(*) FROM (SELECT 1 FROM tasks WHERE state = 'pending' AND in_line AND NOT bounded
    AND requested_mode = l.mode AND resource_class = l.resource_class AND user_name = l.user_name LIMIT :most) waiting)
FROM unnest(CAST(:modes AS text[]), CAST(:classes AS text[]), CAST(:users AS text[]))
    WITH ORDINALITY AS l(mode, resource_class, user_name, ord)
""")


def backlogs(
    connection: Connection, keys: Sequence[QueueKey], most: int, bounded: Iterable[BoundedRun] = ()
) -> dict[QueueKey, int]:
    """Counts the tasks of each of these queues, up to `most`; of bounded runs, as many as they have room for."""
    if not keys:
        return {}
    values = {
        "modes": [queue.mode.value for queue in keys],
        "classes": [queue.resource_class for queue in keys],
        "users": [queue.user_name for queue in keys],
        "most": most,
    }
    counts = {keys[row[0] - 1]: row[1] for row in connection.execute(_BACKLOGS, values)}
    for run in bounded:
        if run.queue in counts and run.room:
            counts[run.queue] += _count_of_run(connection, run, most)
    return {key: min(most, count) for key, count in counts.items()}


def _count_of_run(connection: Connection, run: BoundedRun, most: int) -> int:
    """Counts the run's tasks in its queue, up to its room and `most`."""
    count = sql(
        connection,
        "SELECT count(*) FROM (SELECT 1 FROM tasks WHERE bounded AND state = 'pending' AND in_line"
        " AND run_id = :run AND requested_mode = :mode AND resource_class = :class LIMIT :room) waiting",
        {
            "run": run.run_id,
            "mode": run.queue.mode.value,
            "class": run.queue.resource_class,
            "room": min(run.room, most),
        },
    ).scalar_one()
    return int(count)


STILLBORN_S = 30.0
"""Seconds of history searched for instances that failed before they were ready or, if ephemeral, got their attempt."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Current use, by mode and class."""

    live: Counter[Key] = field(default_factory=Counter)  # attempts dispatched or running
    unclaimed: Counter[Key] = field(default_factory=Counter)  # attempts dispatched
    by_user: Counter[tuple[str, Key]] = field(default_factory=Counter)  # live attempts of each user
    coming: Counter[Key] = field(default_factory=Counter)  # instances requested, booting, ready without an attempt
    instances: Counter[Key] = field(default_factory=Counter)  # not ended and not draining
    slots: Counter[Key] = field(default_factory=Counter)  # of ready instances
    draining: Counter[Key] = field(default_factory=Counter)  # live attempts on instances that take nothing new
    stillborn: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # failed lately before any use, while none was used
    spread: set[str] = field(default_factory=set)  # classes whose standing instances take work on several hosts
    unfinished_gradings: Counter[str] = field(default_factory=Counter)  # by class: waiting or with a grader
    graders: Counter[str] = field(default_factory=Counter)  # by class: not ended and not draining
    graded_apart: set[str] = field(default_factory=set)  # classes with live attempts that will need a grader


def occupancy(connection: Connection) -> Occupancy:
    """Reads the use by attempts and instances."""
    use = Occupancy()
    for row in sql(
        connection,
        "SELECT mode, resource_class, user_name, state, count(*) AS live"
        " FROM attempts WHERE state IN ('dispatched', 'running') GROUP BY 1, 2, 3, 4",
    ):
        key = (Mode(row.mode), row.resource_class)
        use.live[key] += row.live
        use.by_user[row.user_name, key] += row.live
        if row.state == "dispatched":
            use.unclaimed[key] += row.live
    for row in sql(
        connection,
        "SELECT mode, resource_class, count(*) FILTER (WHERE state <> 'draining') AS instances,"
        " count(*) FILTER (WHERE state IN ('requested', 'booting', 'ready')) AS coming,"
        " coalesce(sum(slots) FILTER (WHERE state = 'ready'), 0) AS slots,"
        " count(*) FILTER (WHERE state = 'draining') AS draining,"
        " min(host) FILTER (WHERE state = 'ready') <> max(host) FILTER (WHERE state = 'ready') AS spread"
        " FROM instances WHERE state NOT IN ('terminated', 'failed') GROUP BY 1, 2",
    ):
        if row.mode == InstanceMode.GRADING:
            use.graders[row.resource_class] = row.instances
            continue
        key = (Mode(row.mode), row.resource_class)
        use.coming[key], use.instances[key], use.slots[key] = row.coming, row.instances, int(row.slots)
        if row.draining and key[0] is Mode.PERSISTENT:
            use.draining[key] = _on_draining(connection, key)
        if row.spread:
            use.spread.add(row.resource_class)
    _note_stillborn(connection, use)
    for row in sql(connection, "SELECT resource_class, count(*) AS gradings FROM gradings GROUP BY 1"):
        use.unfinished_gradings[row.resource_class] = row.gradings
    use.graded_apart.update(
        sql(
            connection,
            "SELECT DISTINCT resource_class FROM attempts WHERE graded_apart AND state IN ('dispatched', 'running')",
        ).scalars()
    )
    return use


def _on_draining(connection: Connection, key: Key) -> int:
    """Counts attempts on draining instances: they hold no slot of the instances that still take work."""
    return int(
        sql(
            connection,
            "SELECT count(*) FROM attempts a JOIN instances i ON i.id = a.instance_id"
            " WHERE a.state = 'running' AND a.mode = :mode AND a.resource_class = :class AND i.state = 'draining'",
            {"mode": key[0].value, "class": key[1]},
        ).scalar_one()
    )


def _note_stillborn(connection: Connection, found: Occupancy) -> None:
    for row in sql(
        connection,
        "SELECT f.mode, f.resource_class, f.stillborn FROM (SELECT mode, resource_class, count(*) AS stillborn"
        " FROM instances WHERE state = 'failed' AND handle IS NOT NULL"
        " AND (ready_at IS NULL OR mode = 'ephemeral' AND attempt_id IS NULL)"
        " AND requested_at > clock_timestamp() - make_interval(secs => :s) GROUP BY 1, 2) f"
        " WHERE NOT EXISTS (SELECT 1 FROM instances i WHERE i.mode = f.mode"
        " AND i.resource_class = f.resource_class AND (i.mode <> 'ephemeral' OR i.attempt_id IS NOT NULL)"
        " AND i.ready_at > clock_timestamp() - make_interval(secs => :s))",
        {"s": STILLBORN_S},
    ):
        found.stillborn[row.mode, row.resource_class] = row.stillborn


class QueueLimit(NamedTuple):
    """A limit that keeps the tasks of a queue waiting."""

    limit_name: str
    queue: QueueKey


def open_limits(connection: Connection) -> dict[QueueLimit, datetime]:
    """Returns the limits on record that keep queues waiting, and since when; without the rows of pauses."""
    rows = sql(
        connection,
        "SELECT limit_name, mode, resource_class, user_name, since FROM bindings"
        " WHERE until IS NULL AND user_name <> '*'",
    )
    return {QueueLimit(row[0], QueueKey(Mode(row[1]), row[2], row[3])): row.since for row in rows}


def record_limits(connection: Connection, began: Iterable[QueueLimit], ended: Iterable[QueueLimit]) -> None:
    """Records since when and until when limits bind, with events; safe to repeat."""
    for statement, bounds in ((_BIND, list(began)), (_UNBIND, list(ended))):
        if bounds:
            values = {
                "limits": [b.limit_name for b in bounds],
                "users": [b.queue.user_name for b in bounds],
                "modes": [b.queue.mode.value for b in bounds],
                "classes": [b.queue.resource_class for b in bounds],
            }
            connection.execute(statement, values)


_BIND = text("""
WITH begun AS (
    INSERT INTO bindings (limit_name, user_name, mode, resource_class)
    SELECT * FROM unnest(CAST(:limits AS text[]), CAST(:users AS text[]), CAST(:modes AS text[]),
        CAST(:classes AS text[]))
    ON CONFLICT DO NOTHING RETURNING *
)
INSERT INTO events (kind, data) SELECT 'limit.bound',
    jsonb_build_object('limit', limit_name, 'user', user_name, 'mode', mode, 'class', resource_class) FROM begun
""")
_UNBIND = text("""
WITH freed AS (
    UPDATE bindings u SET until = clock_timestamp()
    FROM unnest(CAST(:limits AS text[]), CAST(:users AS text[]), CAST(:modes AS text[]), CAST(:classes AS text[]))
        AS b(limit_name, user_name, mode, resource_class)
    WHERE u.until IS NULL AND u.limit_name = b.limit_name AND u.user_name = b.user_name AND u.mode = b.mode
        AND u.resource_class = b.resource_class RETURNING u.*
)
INSERT INTO events (kind, data) SELECT 'limit.freed',
    jsonb_build_object('limit', limit_name, 'user', user_name, 'mode', mode, 'class', resource_class) FROM freed
""")


def reclaim_lapsed(connection: Connection, retry: RetryPolicy) -> list[UUID]:
    """Takes attempts away whose lease has lapsed or whose deadline has passed; returns those that ended so.

    A grading waits for another grader, if it may be repeated.
    """
    # Locks attempts before leases, as every end of an attempt; then reads the leases again: one may have been renewed.
    ids = sql(
        connection,
        "SELECT a.id FROM attempts a JOIN leases l ON l.attempt_id = a.id"
        " WHERE l.expires_at < clock_timestamp() AND a.state IN ('running', 'grading') FOR UPDATE OF a SKIP LOCKED",
    ).scalars()
    lapsed = sql(
        connection,
        "SELECT attempt_id FROM leases WHERE attempt_id = ANY(CAST(:ids AS uuid[]))"
        " AND expires_at < clock_timestamp() FOR UPDATE SKIP LOCKED",
        {"ids": list(ids)},
    ).scalars()
    reclaimed = gradings.take_away(connection, list(lapsed), _LAPSED, EndReason.LOST, retry)
    overdue = sql(
        connection,
        "SELECT id FROM attempts WHERE state IN ('running', 'grading') AND deadline_at < clock_timestamp() ORDER BY id",
    ).scalars()
    return reclaimed + gradings.take_away(connection, list(overdue), _OVERDUE, EndReason.DEADLINE, retry)


_LAPSED = Failure(error="StaleWriter", message="its worker stopped renewing the lease")
_OVERDUE = Failure(error="EnvironmentFailed", message="the attempt outlived its deadline and was stopped")
