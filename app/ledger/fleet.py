"""The instances that there are, as a person wants to see and name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import text

from app.errors import AmbiguousName, UnknownName
from app.ledger.database import Database
from app.models.spec import Mode


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """One live instance. Ages in seconds."""

    id: UUID
    mode: Mode
    resource_class: str
    provider: str
    handle: str | None
    state: str
    slots: int
    used: int  # attempts that run on it
    age_s: float
    silent_s: float | None  # since its last sign of life; None: there was none yet
    draining_why: str | None
    deadline_at: datetime | None


_LIVE = """
SELECT i.id, i.mode, i.resource_class, i.provider, i.handle, i.state, i.slots, i.draining_why, i.deadline_at,
    extract(epoch FROM clock_timestamp() - i.requested_at)::float8 AS age_s,
    extract(epoch FROM clock_timestamp() - coalesce(i.seen_at, i.ready_at))::float8 AS silent_s,
    (SELECT count(*) FROM attempts a WHERE a.instance_id = i.id AND a.state = 'running') AS used
FROM instances i WHERE i.state NOT IN ('terminated', 'failed')
"""


def live(database: Database, ids: Sequence[UUID] | None = None) -> list[LiveInstance]:
    """Instances that have not ended, by mode, class and age; only those of `ids` when given."""
    chosen = "" if ids is None else " AND i.id = ANY(:ids)"
    with database.begin() as connection:
        rows = connection.execute(
            text(f"{_LIVE}{chosen} ORDER BY i.mode, i.resource_class, i.requested_at, i.id"),
            {} if ids is None else {"ids": list(ids)},
        )
        return [LiveInstance(**{**row._asdict(), "mode": Mode(row.mode)}) for row in rows]


def find(database: Database, name: str) -> UUID:
    """The live instance whose id begins or ends so, or whose provider calls it so (a pid, a container id).

    Raises: UnknownName; AmbiguousName.
    """
    wanted = name.lower().replace("-", "")
    with database.begin() as connection:
        found = list(
            connection.execute(
                text(
                    "SELECT id FROM instances WHERE state NOT IN ('terminated', 'failed')"
                    " AND (starts_with(replace(id::text, '-', ''), :wanted)"
                    " OR right(replace(id::text, '-', ''), length(:wanted)) = :wanted OR handle = :name) LIMIT 2"
                ),
                {"wanted": wanted, "name": name},
            ).scalars()
        )
    if not found or not wanted:
        raise UnknownName(f"unknown live instance {name!r}; `megaflow instances` lists them")
    if len(found) > 1:
        raise AmbiguousName(f"more than one live instance fits {name!r}; expected more of the id")
    return UUID(str(found[0]))
