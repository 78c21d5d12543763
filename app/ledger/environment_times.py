"""Summarises how long environments took, by phase, kind and path.

An attempt has an environment for its agent and may have another for its grading; each counts. The times before its
first command are in `phases`, with `image_by` for how the image was obtained; the total wait is `ready_s`. The times
after its last command, a reset for the next attempt or the teardown, are in `reset` and `after`. If no environment came
up, the phases until then have a path of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from app.ledger.database import sql

FAILED = "failed"
"""Path of environments that never came up: their times are kept apart from those of the others."""
BUCKETS_S: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0),
)
"""Upper bounds of the histogram, in seconds: from a recycled environment to a set-up near its time limit."""


@dataclass(frozen=True, slots=True)
class PhaseHistogram:
    """`counts[n]`: number above `BUCKETS_S[n - 1]` and up to `BUCKETS_S[n]` seconds; the last: above all bounds."""

    kind: str
    path: str
    phase: str
    counts: tuple[int, ...]
    sum_s: float


SPANS = """
    WITH used AS (
        SELECT coalesce(each.value->>'kind', a.environment->>'kind', 'unknown') AS kind, each.value AS one
        FROM attempts a, LATERAL jsonb_each(
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
TOLD = "a.environment ?| ARRAY['phases', 'teardown']"
# The cast in a condition of the planner's own would run on any row: it stands behind the choice of attempts.
_HISTOGRAM = """
    SELECT kind, path, phase, bucket, count(*) AS number, sum(took_s) AS sum_s FROM (
        SELECT *, array_position(ARRAY(SELECT took_s <= b FROM unnest(CAST(:bounds AS float8[])) WITH ORDINALITY
            AS x(b, n) ORDER BY n), true) AS bucket FROM spans) AS s
    GROUP BY 1, 2, 3, 4
"""


def histograms(connection: Connection, after: datetime | None, until: datetime) -> list[PhaseHistogram]:
    """Reads the histograms of attempts that finished after `after` (None: no lower bound) and by `until`."""
    statement = SPANS.format(chosen=f"{TOLD} AND {finished(after)}")
    values = {"until": until, "bounds": list(BUCKETS_S), **({} if after is None else {"after": after})}
    counts: dict[tuple[str, str, str], list[int]] = {}
    sums: dict[tuple[str, str, str], float] = {}
    for row in sql(connection, statement + _HISTOGRAM, values):
        key = (row.kind, row.path, row.phase)
        counts.setdefault(key, [0] * (len(BUCKETS_S) + 1))[(row.bucket or len(BUCKETS_S) + 1) - 1] += row.number
        sums[key] = sums.get(key, 0.0) + row.sum_s
    return [PhaseHistogram(*key, tuple(numbers), sums[key]) for key, numbers in sorted(counts.items())]


def finished(after: datetime | None) -> str:
    """Returns an SQL condition on attempts; the caller binds `:until` and, unless `after` is None, `:after`."""
    return "a.finished_at <= :until" + ("" if after is None else " AND a.finished_at > :after")


def added(one: Mapping[str, PhaseHistogram], more: Sequence[PhaseHistogram]) -> dict[str, PhaseHistogram]:
    """Adds newly counted histograms to the earlier ones."""
    sums = dict(one)
    for new in more:
        key = f"{new.kind} {new.path} {new.phase}"
        old = sums.get(key)
        counts = new.counts if old is None else tuple(a + b for a, b in zip(old.counts, new.counts, strict=True))
        sum_s = new.sum_s + (old.sum_s if old else 0.0)
        sums[key] = PhaseHistogram(new.kind, new.path, new.phase, counts, sum_s)
    return sums


@dataclass(frozen=True, slots=True)
class Measures:
    """Current counts of tasks and instances."""

    tasks: Mapping[str, int]  # by state
    instances: Mapping[tuple[str, str], int]  # by mode and state
    waiting: Mapping[tuple[str, str], int]  # tasks that could be admitted, by class and requested mode


def counts_now(connection: Connection) -> Measures:
    """Counts tasks and live instances now. Ended instances are left out: their number only grows."""
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
    """Counts attempts that finished after `after` (None: ever) and by `until`, by mode and end reason."""
    rows = sql(
        connection,
        "SELECT a.mode, coalesce(a.end_reason, '') AS reason, count(*) AS number FROM attempts a"  # noqa: S608
        f" WHERE {finished(after)} GROUP BY 1, 2",
        {"until": until, **({} if after is None else {"after": after})},
    )
    return Counter({(row.mode, row.reason): row.number for row in rows})
