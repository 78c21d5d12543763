"""Counts tasks, instances and ended attempts for the metrics, and names the path of what never came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from app.ledger.database import sql

FAILED = "failed"
"""The path of what never came: what was spent until then is no part of the times of those that did."""


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
