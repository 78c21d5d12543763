"""The life of an instance in the ledger: requested, ready, gone, swept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text
from uuid_utils import compat as uuids

from app.ledger import attempts, events
from app.ledger.attempts import RetryPolicy
from app.ledger.database import Database
from app.ledger.events import Fact
from app.models.endings import EndReason
from app.models.outcome import Failure
from app.models.spec import Mode

INTERRUPTED_EXIT = 75
"""Exit code (EX_TEMPFAIL) of a worker that was told to stop and gave its attempts back."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One kind of instance, and how many more of it are wanted."""

    provider: str
    mode: Mode
    resource_class: str
    slots: int
    count: int
    lifetime_s: float | None


def request(connection: Connection, wanted: Wanted) -> list[UUID]:
    """Write the rows of instances about to be asked for; a crash in between leaves rows that time out."""
    ids = [uuids.uuid7() for _ in range(wanted.count)]
    connection.execute(
        text(
            "INSERT INTO instances (id, provider, mode, resource_class, slots, deadline_at) VALUES (:id, :provider,"
            " :mode, :resource_class, :slots, clock_timestamp() + make_interval(secs => CAST(:lifetime AS float8)))"
        ),
        [
            {
                "id": instance_id,
                "provider": wanted.provider,
                "mode": wanted.mode.value,
                "resource_class": wanted.resource_class,
                "slots": wanted.slots,
                "lifetime": wanted.lifetime_s,
            }
            for instance_id in ids
        ],
    )
    events.append(connection, *(Fact("instance.requested", instance_id=i, data={"mode": wanted.mode}) for i in ids))
    return ids


def launched(database: Database, handles: dict[UUID, str]) -> None:
    """The provider has them. An instance that is ready already (it was quick) keeps its state."""
    with database.begin() as connection:
        for instance_id, handle in handles.items():
            connection.execute(
                text(
                    "UPDATE instances SET handle = :handle,"
                    " state = CASE WHEN state = 'requested' THEN 'booting' ELSE state END WHERE id = :id"
                ),
                {"id": instance_id, "handle": handle},
            )


def ready(database: Database, instance_id: UUID) -> bool:
    """Its worker listens. False when nobody expects it any more: then it must leave."""
    with database.begin() as connection:
        moved = connection.execute(
            text(
                "UPDATE instances SET state = 'ready', ready_at = clock_timestamp(), seen_at = clock_timestamp()"
                " WHERE id = :id AND state IN ('requested', 'booting') RETURNING id"
            ),
            {"id": instance_id},
        ).first()
        if moved is not None:
            events.append(connection, Fact("instance.ready", instance_id=instance_id))
            events.wake_dispatcher(connection)
    return moved is not None


def register(
    database: Database, instance_id: UUID, *, mode: Mode, resource_class: str, slots: int, handle: str
) -> None:
    """A standing instance that somebody else started (a compose service, a person) makes itself known."""
    with database.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO instances (id, provider, mode, resource_class, slots, handle, state)"
                " VALUES (:id, 'static', :mode, :resource_class, :slots, :handle, 'booting')"
            ),
            {
                "id": instance_id,
                "mode": mode.value,
                "resource_class": resource_class,
                "slots": slots,
                "handle": handle,
            },
        )


def seen(database: Database, instance_id: UUID) -> bool:
    """A sign of life. False when the row is closed: then the worker must leave."""
    with database.begin() as connection:
        row = connection.execute(
            text(
                "UPDATE instances SET seen_at = clock_timestamp()"
                " WHERE id = :id AND state NOT IN ('terminated', 'failed') RETURNING id"
            ),
            {"id": instance_id},
        ).first()
    return row is not None


def draining(database: Database, instance_id: UUID) -> None:
    """It takes nothing new from here on."""
    with database.begin() as connection:
        connection.execute(
            text("UPDATE instances SET state = 'draining' WHERE id = :id AND state IN ('booting', 'ready', 'busy')"),
            {"id": instance_id},
        )


def exited(database: Database, instance_id: UUID, exit_code: int | None, why: str, retry: RetryPolicy) -> bool:
    """The instance is gone: close its row, take its attempts back. False when that was known already."""
    with database.begin() as connection:
        row = connection.execute(
            text(
                "UPDATE instances SET exit_code = :code, ended_at = clock_timestamp(),"
                " state = CASE WHEN :code IN (0, :interrupted) THEN 'terminated' ELSE 'failed' END"
                " WHERE id = :id AND state NOT IN ('terminated', 'failed') RETURNING state"
            ),
            {"id": instance_id, "code": exit_code, "interrupted": INTERRUPTED_EXIT},
        ).first()
        if row is None:
            return False
        data = {"exit_code": exit_code, "why": why}
        events.append(connection, Fact(f"instance.{row.state}", instance_id=instance_id, data=data))
        _take_back(connection, instance_id, exit_code, why, retry)
        events.wake_dispatcher(connection)
    return True


def _take_back(connection: Connection, instance_id: UUID, exit_code: int | None, why: str, retry: RetryPolicy) -> None:
    running = connection.execute(
        text("SELECT id FROM attempts WHERE instance_id = :id AND state = 'running'"), {"id": instance_id}
    )
    reason = EndReason.INTERRUPTED if exit_code == INTERRUPTED_EXIT else EndReason.LOST
    failure = Failure(error="InstanceFailed", message=f"its instance is gone: {why}")
    attempts.lose(connection, [row.id for row in running], failure, reason, retry)


@dataclass(frozen=True, slots=True)
class Live:
    """A live instance as the sweeper sees it. Ages in seconds."""

    id: UUID
    provider: str
    mode: Mode
    state: str
    handle: str | None
    age_s: float
    overdue: bool  # past its deadline
    silent_s: float  # since its last sign of life


def live(database: Database) -> list[Live]:
    """Every instance that has not ended."""
    with database.begin() as connection:
        rows = connection.execute(
            text(
                "SELECT id, provider, mode, state, handle,"
                " extract(epoch FROM clock_timestamp() - requested_at)::float8 AS age_s,"
                " coalesce(deadline_at < clock_timestamp(), false) AS overdue,"
                " extract(epoch FROM clock_timestamp() - coalesce(seen_at, requested_at))::float8 AS silent_s"
                " FROM instances WHERE state NOT IN ('terminated', 'failed')"
            )
        )
        return [_live(row) for row in rows]


def _live(row: Row[Any]) -> Live:
    return Live(row.id, row.provider, Mode(row.mode), row.state, row.handle, row.age_s, row.overdue, row.silent_s)


def unswept(database: Database) -> list[UUID]:
    """Instances that have ended and may have left containers behind."""
    with database.begin() as connection:
        rows = connection.execute(
            text("SELECT id FROM instances WHERE swept_at IS NULL AND state IN ('terminated', 'failed') LIMIT 500")
        )
        return [row.id for row in rows]


def swept(database: Database, instance_ids: Sequence[UUID]) -> None:
    """Nothing of these instances is left."""
    with database.begin() as connection:
        connection.execute(
            text("UPDATE instances SET swept_at = clock_timestamp() WHERE id = ANY(:ids)"), {"ids": list(instance_ids)}
        )


def live_ids(database: Database) -> set[UUID]:
    """Ids of the instances that have not ended."""
    return {instance.id for instance in live(database)}
