"""Writes and reads receipts: resources created for a run, their remover, those that still exist and why.

A line is written as soon as a resource exists, and again when it has been removed. A line that was missed (a crash in
between) is written at the removal, from the labels of the resource.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import UnknownName
from app.ledger.database import Database, sql
from app.models.states import LIVE_ATTEMPT, LIVE_INSTANCE


class ObjectKind(StrEnum):
    CONTAINER = "container"
    NETWORK = "network"
    VOLUME = "volume"
    FOLDER = "folder"  # of a local environment
    ENVIRONMENT = "environment"  # made on its host without a container engine
    POD = "pod"

    @property
    def engines(self) -> bool:
        """Whether a container engine lists it."""
        return self.lister == "engine"

    @property
    def lister(self) -> str:
        """Lister that shows whether it exists: `engine` or `kubernetes`; empty: the disk of its host."""
        if self is ObjectKind.POD:
            return "kubernetes"
        return "" if self in (ObjectKind.FOLDER, ObjectKind.ENVIRONMENT) else "engine"


class Remover(StrEnum):
    """Component that removed a resource."""

    WORKER = "worker"
    SWEEPER = "sweeper"
    UNKNOWN = "unknown"  # its removal was not recorded


class Owner(NamedTuple):
    """Attempt that a resource was made for, from its labels."""

    run_id: UUID
    task_id: UUID
    attempt_id: UUID
    instance_id: UUID


class NewResource(NamedTuple):
    """An engine object or folder to be recorded. `created_at` None: just now."""

    kind: ObjectKind
    id: str
    owner: Owner
    created_at: datetime | None = None


_COLUMNS = "engine_id, kind, run_id, task_id, attempt_id, instance_id, created_at"
_THINGS = (
    f"SELECT {_COLUMNS} FROM unnest(CAST(:ids AS text[]), CAST(:kinds AS text[]), CAST(:runs AS uuid[]),"  # noqa: S608
    " CAST(:tasks AS uuid[]), CAST(:attempts AS uuid[]), CAST(:instances AS uuid[]), CAST(:times AS timestamptz[]))"
    f" AS things({_COLUMNS})"
)


def _facts(kind: str) -> str:
    """Returns SQL that appends a fact for every row of `written`."""
    return f""" INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id, data)
        SELECT '{kind}', run_id, task_id, attempt_id, instance_id, jsonb_strip_nulls(
            jsonb_build_object('engine_id', engine_id, 'kind', kind, 'by', destroyed_by)) FROM written"""  # noqa: S608


_CREATED = text(
    f"WITH things AS ({_THINGS}), written AS (INSERT INTO created_resources ({_COLUMNS})"  # noqa: S608
    " SELECT engine_id, kind, run_id, task_id, attempt_id, instance_id, coalesce(created_at, clock_timestamp())"
    " FROM things ON CONFLICT DO NOTHING RETURNING *)" + _facts("environment.created")
)

_DESTROYED = text(
    f"WITH things AS ({_THINGS}), written AS (INSERT INTO created_resources AS o"  # noqa: S608
    f" ({_COLUMNS}, destroyed_at, destroyed_by)"
    " SELECT engine_id, kind, run_id, task_id, attempt_id, instance_id, coalesce(created_at, clock_timestamp()),"
    " clock_timestamp(), :by FROM things ORDER BY engine_id"
    " ON CONFLICT (engine_id) DO UPDATE SET destroyed_at = clock_timestamp(), destroyed_by = :by"
    " WHERE o.destroyed_at IS NULL RETURNING o.*)" + _facts("environment.destroyed")
)

_VANISHED = text(
    "WITH written AS (UPDATE created_resources SET destroyed_at = clock_timestamp(), destroyed_by = 'unknown'"  # noqa: S608
    " WHERE engine_id = ANY(:ids) AND destroyed_at IS NULL RETURNING *)" + _facts("environment.destroyed")
)


def created(connection: Connection, things: Sequence[NewResource]) -> None:
    """Records that these exist, within the caller's transaction. A line that is on record already does not change."""
    if things:
        connection.execute(_CREATED, _arrays(things))


def destroyed(connection: Connection, things: Sequence[NewResource], by: Remover) -> None:
    """Records that these were removed; an unrecorded one gets its whole line. Only the first removal counts."""
    if things:
        connection.execute(_DESTROYED, {**_arrays(things), "by": by.value})


def vanished(connection: Connection, ids: Sequence[str]) -> None:
    """Records that these resources no longer exist; their removal was not recorded."""
    if ids:
        connection.execute(_VANISHED, {"ids": list(ids)})


def _arrays(things: Sequence[NewResource]) -> dict[str, list[Any]]:
    return {
        "ids": [thing.id for thing in things],
        "kinds": [thing.kind.value for thing in things],
        "runs": [thing.owner.run_id for thing in things],
        "tasks": [thing.owner.task_id for thing in things],
        "attempts": [thing.owner.attempt_id for thing in things],
        "instances": [thing.owner.instance_id for thing in things],
        "times": [thing.created_at for thing in things],
    }


_IN_SIGHT = text("""
SELECT o.engine_id, o.kind FROM created_resources o JOIN instances i ON i.id = o.instance_id
WHERE o.destroyed_at IS NULL AND o.created_at < clock_timestamp() - interval '5 s'
    AND (i.provider = 'static' AND split_part(coalesce(i.handle, ''), ':', 1) = :host
        OR :control AND (i.provider = 'process' OR i.provider = 'docker'
            AND (o.kind NOT IN ('folder', 'environment') OR i.state IN ('terminated', 'failed')))
        OR :control AND o.kind = 'pod')
""")


def open_in_sight(database: Database, host: str, *, control: bool) -> list[tuple[str, ObjectKind]]:
    """Returns resources on record as existing that `host` could see: in its engine, its folders and its cluster.

    control: the control plane runs on it, so that resources of instances that it launched are there too.
    """
    rows = database.sql(_IN_SIGHT, {"host": host, "control": control})
    return [(row.engine_id, ObjectKind(row.kind)) for row in rows]


@dataclass(frozen=True, slots=True)
class ObjectLine:
    """A line of a resource. `why` is set while it exists; `accounted`: it is still needed or about to be removed."""

    engine_id: str
    kind: ObjectKind
    task_id: UUID
    attempt_id: UUID
    instance_id: UUID | None
    created_at: datetime
    destroyed_at: datetime | None
    destroyed_by: str | None
    why: str | None = None
    accounted: bool = True


@dataclass(frozen=True, slots=True)
class InstanceLine:
    """An instance that attempts of the run were on; `attempts`: their number."""

    id: UUID
    provider: str
    mode: str
    resource_class: str
    handle: str | None
    state: str
    requested_at: datetime
    ready_at: datetime | None
    ended_at: datetime | None
    exit_code: int | None
    attempts: int
    why: str | None = None  # why it exists
    accounted: bool = True

    @property
    def ended(self) -> bool:
        return self.state not in LIVE_INSTANCE


@dataclass(frozen=True, slots=True)
class Receipt:
    """Everything that a run's attempts used and created."""

    run_id: UUID
    name: str
    user_name: str
    created_at: datetime
    ended_at: datetime | None  # of the last task; None: not all have ended
    tasks: int
    attempts: dict[str, int]  # by state
    instances: tuple[InstanceLine, ...]
    objects: tuple[ObjectLine, ...]
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # kind: made, gone, standing

    @property
    def standing(self) -> list[ObjectLine | InstanceLine]:
        """Lines of what still exists."""
        lines: list[ObjectLine | InstanceLine] = [*self.instances, *self.objects]
        return [line for line in lines if line.why is not None]


def of_run(database: Database, run_id: UUID) -> Receipt:
    """Raises: UnknownName."""
    with database.begin() as connection:
        sql(connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        run = connection.execute(_RUN, {"id": run_id}).first()
        if run is None:
            raise UnknownName(f"unknown run {run_id}; `megaflow runs` lists them")
        attempts = {row.state: row.n for row in connection.execute(_ATTEMPTS, {"id": run_id})}
        instances = tuple(_instance_line(row) for row in connection.execute(_INSTANCES, {"id": run_id}))
        objects = tuple(_object_line(row) for row in connection.execute(_OBJECTS, {"id": run_id}))
    return Receipt(
        run_id=run.id,
        name=run.name,
        user_name=run.user_name,
        created_at=run.created_at,
        ended_at=None if run.left_over else run.ended_at,
        tasks=run.tasks,
        attempts=attempts,
        instances=instances,
        objects=objects,
        counts=_counts(instances, objects),
    )


_RUN = text(
    "SELECT r.id, r.name, r.user_name, r.created_at, max(t.finished_at) AS ended_at, count(t.id) AS tasks,"
    " coalesce(bool_or(t.state IN ('pending', 'admitted', 'running')), false) AS left_over"
    " FROM runs r LEFT JOIN tasks t ON t.run_id = r.id WHERE r.id = :id GROUP BY r.id"
)
_ATTEMPTS = text(
    "SELECT a.state, count(*) AS n FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE t.run_id = :id GROUP BY 1"
)
_INSTANCES = text("""
SELECT i.*, u.attempts, u.running, i.ended_at < now() - interval '60 s' AS late,
    coalesce(u.last_end < now() - interval '120 s', false) AS overstays
FROM instances i JOIN (
    SELECT a.instance_id, count(*) AS attempts, bool_or(a.state = 'running') AS running, max(a.finished_at) AS last_end
    FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE t.run_id = :id AND a.instance_id IS NOT NULL GROUP BY 1
) u ON u.instance_id = i.id ORDER BY i.requested_at, i.id
""")
_OBJECTS = text("""
SELECT o.*, i.state AS instance_state, i.mode, i.swept_at, i.ended_at, a.state AS attempt_state,
    coalesce(a.finished_at < now() - interval '120 s', true) AS attempt_over,
    coalesce(i.ended_at < now() - interval '120 s', true) AS instance_over,
    CASE WHEN o.destroyed_at IS NULL THEN (
        SELECT u.id FROM attempts u WHERE u.instance_id = o.instance_id AND u.state = 'running' AND u.id <> o.attempt_id
            AND u.environment->>'id' = o.engine_id LIMIT 1) END AS lent_to
FROM created_resources o LEFT JOIN instances i ON i.id = o.instance_id LEFT JOIN attempts a ON a.id = o.attempt_id
WHERE o.run_id = :id ORDER BY o.created_at, o.engine_id
""")


def _instance_line(row: Row[Any]) -> InstanceLine:
    names = [name for name in InstanceLine.__dataclass_fields__ if name not in ("why", "accounted")]
    why, accounted = _why_it_lives(row)
    return InstanceLine(**{name: getattr(row, name) for name in names}, why=why, accounted=accounted)


def _why_it_lives(row: Row[Any]) -> tuple[str | None, bool]:
    if row.state not in LIVE_INSTANCE:
        return None, True
    if row.mode != "ephemeral":
        return f"a standing instance of the pool {row.mode}.{row.resource_class}", True
    if row.running:
        return "its attempt runs", True
    return "its attempt has ended; it is leaving", not row.overstays


def _object_line(row: Row[Any]) -> ObjectLine:
    names = [name for name in ObjectLine.__dataclass_fields__ if name not in ("why", "accounted", "kind")]
    why, accounted = (None, True) if row.destroyed_at is not None else _why_it_stands(row)
    values = {name: getattr(row, name) for name in names}
    return ObjectLine(**values, kind=ObjectKind(row.kind), why=why, accounted=accounted)


def _why_it_stands(row: Row[Any]) -> tuple[str, bool]:
    """Returns the reason why a resource exists, and whether the reason is a good one."""
    if row.kind == ObjectKind.NETWORK:
        return "kept for all runs of the installation; `megaflow down` removes it", True
    if row.attempt_state in LIVE_ATTEMPT:
        return "its attempt runs", True
    if row.lent_to is not None:
        return f"lent to attempt {row.lent_to} by the pool of instance {row.instance_id}", True
    if row.instance_state not in LIVE_INSTANCE:
        swept = row.swept_at is not None or row.instance_over
        return ("left behind: its instance has ended" if swept else "its instance has ended; a sweep is due"), not swept
    if row.mode != "ephemeral" and row.kind != ObjectKind.FOLDER:
        return f"kept idle in the pool of instance {row.instance_id} for reuse", True
    how = "left behind: its attempt has ended" if row.attempt_over else "its attempt has ended; teardown is under way"
    return how, not row.attempt_over


def _counts(instances: Sequence[InstanceLine], objects: Sequence[ObjectLine]) -> dict[str, dict[str, int]]:
    totals: Counter[str] = Counter(line.kind.value for line in objects)
    removed: Counter[str] = Counter(line.kind.value for line in objects if line.destroyed_at is not None)
    totals["instance"], removed["instance"] = len(instances), sum(line.ended for line in instances)
    return {
        kind: {"made": totals[kind], "gone": removed[kind], "standing": totals[kind] - removed[kind]}
        for kind in ("instance", *ObjectKind)
        if totals[kind] or kind == "instance"
    }


_ISSUE = 73055
"""Advisory lock for issuing receipts, so that a run gets only one."""
_LATEST_S = 300.0
"""A receipt waits at most this long after the run's end for removals; then it lists what still exists."""

# Each step leaves few runs to the next, more costly one. A subquery with LIMIT is evaluated for each run by itself.
_DUE = text("""
WITH issued AS MATERIALIZED (SELECT run_id FROM events WHERE kind = 'run.receipt' AND run_id IS NOT NULL),
waiting AS MATERIALIZED (SELECT id, created_at FROM runs WHERE id NOT IN (SELECT run_id FROM issued)),
ended AS MATERIALIZED (
    SELECT w.id, w.created_at FROM waiting w
    WHERE (SELECT t.id FROM tasks t WHERE t.run_id = w.id AND t.state IN ('pending', 'admitted', 'running') LIMIT 1)
            IS NULL
        AND (SELECT t.id FROM tasks t WHERE t.run_id = w.id LIMIT 1) IS NOT NULL
        AND NOT EXISTS (SELECT FROM experience_groups g WHERE g.run_id = w.id AND g.state = 'open')
    ORDER BY w.created_at LIMIT 500)
SELECT e.id FROM ended e
WHERE (SELECT a.id FROM tasks t JOIN attempts a ON a.task_id = t.id JOIN instances i ON i.id = a.instance_id
        WHERE t.run_id = e.id AND NOT (
            i.state IN ('terminated', 'failed') AND i.swept_at IS NOT NULL
                AND (NOT jsonb_exists(a.phases, 'grading_started') OR jsonb_exists(a.phases, 'torn_down'))
            OR i.mode = 'persistent' AND a.state <> 'running' AND jsonb_exists(a.phases, 'torn_down'))
        LIMIT 1) IS NULL
    OR (SELECT max(t.finished_at) FROM tasks t WHERE t.run_id = e.id) < now() - make_interval(secs => :latest)
ORDER BY e.created_at
""")

_APPEND = text("""
INSERT INTO events (kind, run_id, data)
SELECT 'run.receipt', r.id, jsonb_build_object(
    'tasks', (SELECT count(*) FROM tasks t WHERE t.run_id = r.id),
    'attempts', used.attempts, 'instances', used.instances, 'instances_standing', used.standing,
    'made', coalesce(made.made, '{}'), 'gone', coalesce(made.gone, '{}'), 'standing', coalesce(made.standing, '[]'))
FROM runs r CROSS JOIN LATERAL (
    SELECT count(*) AS attempts, count(DISTINCT a.instance_id) AS instances,
        count(DISTINCT a.instance_id) FILTER (WHERE i.state NOT IN ('terminated', 'failed')) AS standing
    FROM tasks t JOIN attempts a ON a.task_id = t.id LEFT JOIN instances i ON i.id = a.instance_id WHERE t.run_id = r.id
) used CROSS JOIN LATERAL (
    SELECT jsonb_object_agg(kind, n) AS made, jsonb_object_agg(kind, gone) AS gone,
        (SELECT jsonb_agg(s.engine_id) FROM (SELECT o.engine_id FROM created_resources o
            WHERE o.run_id = r.id AND o.destroyed_at IS NULL ORDER BY o.created_at LIMIT 20) s) AS standing
    FROM (SELECT kind, count(*) AS n, count(destroyed_at) AS gone FROM created_resources
        WHERE run_id = r.id GROUP BY 1) k
) made
WHERE r.id = ANY(:due)
""")


def issue(database: Database) -> list[UUID]:
    """Appends the fact `run.receipt` once for every run that has ended and whose resources are removed; returns these.

    Resources that a standing instance keeps for reuse are listed and not waited for. Safe to call concurrently.
    """
    with database.begin() as connection:
        sql(connection, "SELECT pg_advisory_xact_lock(:key)", {"key": _ISSUE})
        due = list(connection.execute(_DUE, {"latest": _LATEST_S}).scalars())
        if due:
            connection.execute(_APPEND, {"due": due})
    return due
