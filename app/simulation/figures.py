"""Reads a simulation's figures from a database that holds nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row

from app.ledger.database import Database, sql

_TASKS = """
SELECT t.user_name, t.state, t.accepted_at, t.finished_at, t.attempts, f.claimed_at
FROM tasks t LEFT JOIN LATERAL (SELECT min(a.claimed_at) AS claimed_at FROM attempts a WHERE a.task_id = t.id) f ON true
"""

_FIGURES = """
    count(*) AS tasks,
    count(*) FILTER (WHERE state = 'succeeded') AS graded,
    count(*) FILTER (WHERE state = 'failed') AS not_scored,
    count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
    coalesce(sum(greatest(attempts - 1, 0)), 0) AS retries,
    extract(epoch FROM max(finished_at) - min(accepted_at))::float8 AS makespan_s,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM claimed_at - accepted_at)::float8) AS wait_p50_s,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM claimed_at - accepted_at)::float8) AS wait_p99_s
"""

_BUSY = """
SELECT coalesce(sum(extract(epoch FROM finished_at - claimed_at)), 0)::float8 AS busy_s,
    (SELECT coalesce(max(n), 0) FROM (SELECT sum(step) OVER (ORDER BY at, step) AS n FROM
        (SELECT claimed_at AS at, 1 AS step FROM attempts WHERE claimed_at IS NOT NULL
         UNION ALL SELECT finished_at, -1 FROM attempts WHERE claimed_at IS NOT NULL AND finished_at IS NOT NULL) moves
        ) held) AS peak
FROM attempts WHERE claimed_at IS NOT NULL AND finished_at IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all tasks, or of one user's. Waits are from acceptance to the first claim; None: nothing was claimed."""

    tasks: int
    graded: int
    not_scored: int
    cancelled: int
    retries: int
    makespan_s: float | None
    wait_p50_s: float | None
    wait_p99_s: float | None

    @property
    def ended(self) -> int:
        return self.graded + self.not_scored + self.cancelled


class Tables(NamedTuple):
    """Everything read at one moment. `busy_s`: summed over the attempts that have ended; `peak`: held at once."""

    total: Figures
    users: dict[str, Figures]
    busy_s: float
    peak: int
    attempt_ends: dict[str, int]
    instances: dict[str, int]


def read(database: Database) -> Tables:
    """Raises: DatabaseUnavailable."""
    with database.begin() as connection:
        total = _figures(sql(connection, f"SELECT {_FIGURES} FROM ({_TASKS}) w").one())  # noqa: S608
        by_user = sql(
            connection,
            f"SELECT user_name, {_FIGURES} FROM ({_TASKS}) w GROUP BY user_name ORDER BY user_name",  # noqa: S608
        )
        users = {row.user_name: _figures(row) for row in by_user}
        busy = sql(connection, _BUSY).one()
        ends = _counts(connection, "SELECT coalesce(end_reason, state), count(*) FROM attempts GROUP BY 1")
        instances = _counts(connection, "SELECT state, count(*) FROM instances GROUP BY 1")
        return Tables(total, users, busy.busy_s, int(busy.peak), ends, instances)


def states(database: Database) -> dict[str, int]:
    """Tasks by state: cheap enough to ask every second. Raises: DatabaseUnavailable."""
    with database.begin() as connection:
        return _counts(connection, "SELECT state, count(*) FROM tasks GROUP BY 1")


def _figures(row: Row[Any]) -> Figures:
    return Figures(*(getattr(row, name) for name in Figures.__dataclass_fields__))


def _counts(connection: Connection, statement: str) -> dict[str, int]:
    return {str(name): int(count) for name, count in sql(connection, f"{statement} ORDER BY 1")}
