"""Summarises how long environments took, by phase, kind and path.

An attempt has an environment for its agent and may have another for its grading; each counts. What the attempt paid
before the first command of each stands in `phases`, with `image_by` for how the image came; all that it waited, in
`ready_s`. What followed its last command, a reset for the next attempt or the teardown, stands in `reset` and `after`.
Where none came, the phases until then stand by a path of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, text

from app.ledger.database import Database, sql

READY = "ready"
"""Pseudo-phase: all that the attempt waited from asking to the first command."""
PHASES = (
    *("image", "pull", "build", "create", "start", "hand_out", "session", "set_up", "other"),
    *(READY, "reset", "teardown"),
)
"""In the order in which they happen. `pull` and `build` are `image` again, of those for which that was done."""
FAILED = "failed"
"""The path of what never came: what was spent until then is no part of the times of those that did."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One phase of the environments of one kind that came by one path; seconds."""

    kind: str
    path: str
    phase: str
    count: int
    p50_s: float
    p95_s: float
    p99_s: float


_SPANS = """
    WITH used AS (
        SELECT coalesce(each.value->>'kind', a.environment->>'kind', 'unknown') AS kind, each.value AS one
        FROM attempts a {joined}, LATERAL jsonb_each(
            CASE WHEN jsonb_typeof(a.environment->'teardown') = 'object' THEN a.environment->'teardown'
            ELSE jsonb_build_object('agent', a.environment) END) each
        WHERE {chosen}
    ), spans AS MATERIALIZED (
        SELECT u.kind, u.one->>'path' AS path, s.phase, s.took_s FROM used u, LATERAL (
            SELECT key AS phase, value::float8 AS took_s
            FROM jsonb_each_text(u.one->'phases') WHERE key NOT IN ('reset', 'teardown')
            UNION ALL
            SELECT u.one->>'image_by', (u.one#>>'{{phases,image}}')::float8
            WHERE u.one->>'image_by' IN ('pull', 'build')
            UNION ALL
            SELECT 'ready', (u.one->>'ready_s')::float8
            UNION ALL
            SELECT 'reset', (u.one#>>'{{reset,took_s}}')::float8
            UNION ALL
            SELECT 'teardown', (u.one#>>'{{after,teardown}}')::float8
        ) s
        WHERE jsonb_typeof(u.one->'phases') = 'object' AND s.took_s IS NOT NULL
    )
"""
_TOLD = "a.environment ?| ARRAY['phases', 'teardown']"
_ROOM = text("SET LOCAL work_mem = '64MB'")
"""Half a million spans are sorted in memory; the 4 MB of a fresh server would take the disk."""
_TABLE = """
    SELECT kind, path, phase, count(*) AS number,
        percentile_disc(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY took_s) AS spread
    FROM spans GROUP BY 1, 2, 3
"""


def table(
    database: Database, *, run_id: UUID | None = None, since: datetime | None = None, until: datetime | None = None
) -> list[PhaseTimes]:
    """Count and percentiles of every phase; by kind, path and the order of phases.

    run_id: of this run alone. since, until: of attempts that were claimed then.
    """
    wanted = {"run": run_id, "since": since, "until": until}
    chosen = {
        "run": "t.run_id = :run",
        "since": "a.claimed_at >= :since",
        "until": "a.claimed_at < :until",
    }
    conditions = [chosen[name] for name, value in wanted.items() if value is not None]
    statement = _SPANS.format(
        joined="JOIN tasks t ON t.id = a.task_id" if run_id else "",
        chosen=" AND ".join([_TOLD, *conditions]),
    )
    values = {name: value for name, value in wanted.items() if value is not None}
    with database.begin() as connection:
        connection.execute(_ROOM)
        rows = sql(connection, statement + _TABLE, values).all()
    found = [PhaseTimes(row.kind, row.path, row.phase, row.number, *row.spread) for row in rows]
    return sorted(found, key=lambda one: (one.kind, one.path, _place(one.phase)))


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


# --- Counts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measures:
    """Numbers of this moment."""

    tasks: Mapping[str, int]  # by state
    instances: Mapping[tuple[str, str], int]  # by mode and state
    waiting: Mapping[tuple[str, str], int]  # tasks that could be admitted, by class and requested mode


def counts_now(connection: Connection) -> Measures:
    """Ended instances are left out: they only grow."""
    tasks = sql(connection, "SELECT state, count(*) AS number FROM tasks GROUP BY 1").all()
    instances = sql(
        connection,
        "SELECT mode, state, count(*) AS number FROM instances WHERE state NOT IN ('terminated', 'failed')"
        " GROUP BY 1, 2",
    ).all()
    waiting = sql(
        connection,
        "SELECT resource_class, requested_mode, count(*) AS number FROM tasks WHERE state = 'pending' AND in_line"
        " GROUP BY 1, 2",
    ).all()
    return Measures(
        {row.state: row.number for row in tasks},
        {(row.mode, row.state): row.number for row in instances},
        {(row.resource_class, row.requested_mode): row.number for row in waiting},
    )


def ended(connection: Connection, after: datetime | None, until: datetime) -> Counter[tuple[str, str]]:
    """Attempts that finished after `after` (None: ever) and by `until`, by mode and end reason."""
    rows = sql(
        connection,
        "SELECT a.mode, coalesce(a.end_reason, '') AS reason, count(*) AS number FROM attempts a"
        " WHERE a.finished_at <= :until AND a.finished_at > coalesce(CAST(:after AS timestamptz), '-infinity')"
        " GROUP BY 1, 2",
        {"until": until, "after": after},
    )
    return Counter({(row.mode, row.reason): row.number for row in rows})
