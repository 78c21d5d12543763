"""Stores schedules, and fires each due time exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.dialects.postgresql import insert
from uuid_utils import compat as uuids

from app.errors import SpecInvalid, UnknownName
from app.ledger import events
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.service_tables import ScheduleRow


@dataclass(frozen=True, slots=True)
class Schedule:
    """A stored schedule. `settled_until`: every due time up to here was fired or passed over.

    `last_due_at`, `last_run` and `last_failure` are of the newest firing, if there is one.
    """

    id: UUID
    name: str
    cron: str
    dataset: str
    submission: dict[str, Any]
    misfire: str
    settled_until: datetime
    last_due_at: datetime | None = None
    last_run: UUID | None = None
    last_failure: str | None = None


def add(database: Database, *, name: str, cron: str, dataset: str, submission: dict[str, Any], misfire: str) -> UUID:
    """Raises: SpecInvalid: the name is taken, or empty."""
    if not name.strip():
        raise SpecInvalid(f"expected a schedule's name, found {name!r}")
    schedule_id = uuids.uuid7()
    values = {"id": schedule_id, "name": name, "cron": cron, "dataset": dataset, "submission": submission}
    statement = insert(ScheduleRow).values(**values, misfire=misfire, settled_until=func.clock_timestamp())
    row = database.sql(statement.on_conflict_do_nothing(index_elements=["name"]).returning(ScheduleRow.id)).first()
    if row is None:
        raise SpecInvalid(f"a schedule named {name!r} exists; remove it first or choose another name")
    return schedule_id


def remove(database: Database, name: str) -> None:
    """Deletes a schedule and its past firings; their runs stay. Raises: UnknownName."""
    with database.begin() as connection:
        if sql(connection, "DELETE FROM schedules WHERE name = :name", {"name": name}).rowcount == 0:
            raise UnknownName(f"unknown schedule {name!r}; `megaflow schedule list` shows them")


def all_of(database: Database) -> list[Schedule]:
    """Returns all schedules, by name."""
    rows = database.sql(
        "SELECT s.id, name, cron, dataset, submission, misfire, settled_until, f.due_at, f.run_id, f.failure"
        " FROM schedules s LEFT JOIN LATERAL (SELECT due_at, run_id, failure FROM schedule_fires"
        " WHERE schedule_id = s.id ORDER BY due_at DESC LIMIT 1) f ON true ORDER BY name"
    )
    return [Schedule(*row) for row in rows]


def claim_due(database: Database, schedule: Schedule, due: Sequence[datetime], until: datetime) -> list[datetime]:
    """Claims the due times that were not claimed, and settles everything up to `until`, in one transaction.

    Two processes that call this at once get disjoint results, by the primary key (schedule, due time).
    """
    with database.begin() as connection:
        claimed = []
        for due_at in due:
            row = sql(
                connection,
                "INSERT INTO schedule_fires (schedule_id, due_at) SELECT id, :due FROM schedules WHERE id = :id"
                " ON CONFLICT DO NOTHING RETURNING due_at",
                {"id": schedule.id, "due": due_at},
            ).first()
            if row is not None:
                claimed.append(due_at)
                events.append(connection, Fact("schedule.due", data={"name": schedule.name, "due_at": str(due_at)}))
        sql(
            connection,
            "UPDATE schedules SET settled_until = greatest(settled_until, :until) WHERE id = :id",
            {"id": schedule.id, "until": until},
        )
    return claimed


def unfinished(database: Database, older_than_s: float) -> list[tuple[Schedule, datetime]]:
    """Returns claimed due times without a recorded run or failure: the firing process died in between."""
    rows = database.sql(
        "SELECT s.id, s.name, s.cron, s.dataset, s.submission, s.misfire, s.settled_until, f.due_at"
        " FROM schedule_fires f JOIN schedules s ON s.id = f.schedule_id"
        " WHERE f.run_id IS NULL AND f.failure IS NULL"
        " AND f.fired_at < clock_timestamp() - make_interval(secs => :age)",
        {"age": older_than_s},
    )
    return [(Schedule(*row[:7]), row[7]) for row in rows]


def note(
    database: Database, schedule_id: UUID, due_at: datetime, *, run_id: UUID | None, failure: str | None = None
) -> None:
    """Records the result of a firing."""
    database.sql(
        "UPDATE schedule_fires SET run_id = :run_id, failure = :failure WHERE schedule_id = :id AND due_at = :due",
        {"id": schedule_id, "due": due_at, "run_id": run_id, "failure": failure},
    )
