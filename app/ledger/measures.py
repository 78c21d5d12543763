"""What the ledger counts for whoever watches it: how much there is now of everything, and what has ended so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from app.ledger.environment_times import finished


@dataclass(frozen=True, slots=True)
class Measures:
    """Numbers of this moment."""

    tasks: Mapping[str, int]  # by state
    instances: Mapping[tuple[str, str], int]  # by mode and state
    waiting: Mapping[tuple[str, str], int]  # tasks that could be admitted, by class and requested mode


def now(connection: Connection) -> Measures:
    """Ended instances are left out: they only grow."""
    tasks = connection.execute(text("SELECT state, count(*) AS number FROM tasks GROUP BY 1")).all()
    instances = connection.execute(
        text(
            "SELECT mode, state, count(*) AS number FROM instances WHERE state NOT IN ('terminated', 'failed')"
            " GROUP BY 1, 2"
        )
    ).all()
    waiting = connection.execute(
        text(
            "SELECT resource_class, requested_mode, count(*) AS number FROM tasks WHERE state = 'pending' AND in_line"
            " GROUP BY 1, 2"
        )
    ).all()
    return Measures(
        {row.state: row.number for row in tasks},
        {(row.mode, row.state): row.number for row in instances},
        {(row.resource_class, row.requested_mode): row.number for row in waiting},
    )


def ended(connection: Connection, after: datetime | None, until: datetime) -> Counter[tuple[str, str]]:
    """Attempts that finished after `after` (None: ever) and by `until`, by mode and end reason."""
    rows = connection.execute(
        text(
            "SELECT a.mode, coalesce(a.end_reason, '') AS reason, count(*) AS number FROM attempts a"  # noqa: S608
            f" WHERE {finished(after)} GROUP BY 1, 2"
        ),
        {"until": until, **({} if after is None else {"after": after})},
    )
    return Counter({(row.mode, row.reason): row.number for row in rows})
