"""Reports a simulation: duration, utilisation, waits per user, losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """Figures of all tasks, or of a user's. Waits are from acceptance to the first claim; None: nothing was claimed."""

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


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Results of a simulation, read at one moment."""

    total: Figures
    users: dict[str, Figures]
    throughput: float
    """Ended tasks per second of the makespan."""
    utilisation: float
    """Share of slot time used by attempts; 1.0: all of `capacity` during the whole makespan."""
    peak: int
    """Maximum of attempts running at once."""
    attempt_ends: dict[str, int]
    """End reasons of all attempts."""
    instances: dict[str, int]
    """Instances by state."""


def report(database: Database, capacity: int) -> SimulationReport:
    """Reports on all tasks in the database, which must contain only the simulation. Raises: DatabaseUnavailable."""
    with database.begin() as connection:
        total = _figures(sql(connection, f"SELECT {_FIGURES} FROM ({_TASKS}) w").one())  # noqa: S608
        by_user = sql(
            connection,
            f"SELECT user_name, {_FIGURES} FROM ({_TASKS}) w GROUP BY user_name ORDER BY user_name",  # noqa: S608
        )
        busy = sql(connection, _BUSY).one()
        return SimulationReport(
            total=total,
            users={row.user_name: _figures(row) for row in by_user},
            throughput=total.ended / total.makespan_s if total.makespan_s else 0.0,
            utilisation=busy.busy_s / (capacity * total.makespan_s) if total.makespan_s else 0.0,
            peak=int(busy.peak),
            attempt_ends=_counts(connection, "SELECT coalesce(end_reason, state), count(*) FROM attempts GROUP BY 1"),
            instances=_counts(connection, "SELECT state, count(*) FROM instances GROUP BY 1"),
        )


def _figures(row: Row[Any]) -> Figures:
    return Figures(*(getattr(row, name) for name in Figures.__dataclass_fields__))


def _counts(connection: Connection, statement: str) -> dict[str, int]:
    return {str(name): int(count) for name, count in sql(connection, f"{statement} ORDER BY 1")}
