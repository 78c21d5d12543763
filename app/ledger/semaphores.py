"""Implements distributed semaphores: one leased row per holder in `semaphore_holders`, first come first served.

The capacity is read live, and use is the number of granted rows: no counter exists that a crash could leave too high.
The next request, or the sweep, deletes a row whose lease lapsed. Source: MegaFlow, section 2.3 (Resource Manager).

Locks: requests for one limit go one after the other (an advisory lock). Every other writer of several rows skips locked
rows, so that no deadlock is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from app.ledger.database import Database, sql
from app.ledger.limits import everybody, wake_waiters


class SemaphoreAnswer(NamedTuple):
    """Result of a request: whether the place was granted; if not, how many are ahead in line (0: next)."""

    granted: bool
    ahead: int


def ask(
    database: Database,
    limit_name: str,
    holder: UUID,
    *,
    capacity_default: int | None,
    lease_s: float,
    attempt_id: UUID | None = None,
    instance_id: UUID | None = None,
) -> SemaphoreAnswer:
    """Takes a place, or joins the line for one. Call again until it is granted; this is safe and renews the lease.

    A place in line is leased as well, for `lease_s`: a holder that does not call in time loses it. `capacity_default`
    applies when `limits` has no row of that name; None: no bound, the row only shows the holder.

    Raises: DatabaseUnavailable.
    """
    values = {"limit": limit_name, "holder": holder, "lease": lease_s}
    with database.begin() as connection:
        connection.execute(_IN_TURN, {"limit": limit_name})
        connection.execute(_DROP_LAPSED, values)
        granted = connection.execute(_ENTER, {**values, "attempt": attempt_id, "instance": instance_id}).scalar()
        if granted is not None:
            return SemaphoreAnswer(True, 0)
        capacity = {"everybody": everybody(limit_name), "default": capacity_default}
        chosen = set(connection.execute(_GRANT, {**values, **capacity}).scalars())
        if chosen - {holder}:
            wake_waiters(connection, [limit_name])
        if holder in chosen:
            return SemaphoreAnswer(True, 0)
        return SemaphoreAnswer(False, connection.execute(_AHEAD, values).scalar_one())


# A client that stops in mid-transaction must not block the others for longer than a few seconds.
_IN_TURN = text(
    "SELECT set_config('idle_in_transaction_session_timeout', '5s', true), set_config('lock_timeout', '15s', true),"
    " pg_advisory_xact_lock(hashtextextended('hold:' || :limit, 0))"
)
# Deleting waits for a renewal in progress and checks again: a place is granted to others only after its row is deleted.
_DROP_LAPSED = text(
    "DELETE FROM semaphore_holders WHERE limit_name = :limit AND holder <> :holder AND expires_at <= clock_timestamp()"
)
_ENTER = text(
    "INSERT INTO semaphore_holders (limit_name, holder, attempt_id, instance_id, expires_at)"
    " VALUES (:limit, :holder, :attempt, :instance, clock_timestamp() + make_interval(secs => :lease))"
    " ON CONFLICT (limit_name, holder) DO UPDATE SET expires_at = excluded.expires_at RETURNING granted_at"
)
_GRANT = text(
    "WITH capacity AS (SELECT coalesce((SELECT floor(capacity)::bigint FROM limits WHERE name = :limit),"
    " (SELECT floor(capacity)::bigint FROM limits WHERE name = :everybody), CAST(:default AS bigint)) AS all_places),"
    " used AS (SELECT count(*) AS places FROM semaphore_holders WHERE limit_name = :limit AND granted_at IS NOT NULL)"
    " UPDATE semaphore_holders SET granted_at = clock_timestamp() WHERE limit_name = :limit AND holder IN ("
    "SELECT holder FROM semaphore_holders WHERE limit_name = :limit AND granted_at IS NULL ORDER BY asked_at, holder"
    # No limit at all where there is no capacity: LIMIT NULL.
    " LIMIT (SELECT CASE WHEN all_places IS NOT NULL THEN greatest(0, all_places - places) END FROM capacity, used))"
    " RETURNING holder"
)
_AHEAD = text(
    "SELECT count(*) FROM semaphore_holders other, semaphore_holders mine"
    " WHERE mine.limit_name = :limit AND mine.holder = :holder"
    " AND other.limit_name = :limit AND other.granted_at IS NULL"
    " AND (other.asked_at, other.holder) < (mine.asked_at, mine.holder)"
)


def release(database: Database, limit_name: str, holder: UUID) -> bool:
    """Releases a place, or a place in line. False: it had lapsed, or was released before.

    Leaving the queue frees no place and wakes no waiter.

    Raises: DatabaseUnavailable: the lease will lapse.
    """
    with database.begin() as connection:
        deleted = sql(
            connection,
            "DELETE FROM semaphore_holders WHERE limit_name = :limit AND holder = :holder RETURNING granted_at",
            {"limit": limit_name, "holder": holder},
        ).first()
        if deleted is not None and deleted.granted_at is not None:
            wake_waiters(connection, [limit_name])
        return deleted is not None


def renew(database: Database, holders: Sequence[UUID], *, lease_s: float) -> set[UUID]:
    """Extends the leases of these holders, in one statement; returns the holders that still have a row.

    A missing one has lapsed, or is being granted at this moment: the next renewal shows which.

    Raises: DatabaseUnavailable.
    """
    return set(database.sql(_RENEW, {"holders": list(holders), "lease": lease_s}).scalars())


def renew_of(connection: Connection, attempt_ids: Sequence[UUID], *, lease_s: float) -> None:
    """Extends all places that these attempts hold or wait for, in the transaction that renews their own leases."""
    connection.execute(_RENEW_OF, {"attempts": list(attempt_ids), "lease": lease_s})


# A row that still exists was not granted to others, even if its lease is over: it may be renewed.
_RENEWING = (
    "UPDATE semaphore_holders SET expires_at = clock_timestamp() + make_interval(secs => :lease)"
    " WHERE (limit_name, holder) IN (SELECT limit_name, holder FROM semaphore_holders WHERE {} FOR UPDATE SKIP LOCKED)"
)
_RENEW = text(_RENEWING.format("holder = ANY(CAST(:holders AS uuid[]))") + " RETURNING holder")
_RENEW_OF = text(_RENEWING.format("attempt_id = ANY(CAST(:attempts AS uuid[]))"))


def sweep(database: Database) -> int:
    """Deletes rows that lapsed or belong to an ended attempt or instance; returns how many.

    Raises: DatabaseUnavailable.
    """
    with database.begin() as connection:
        names = connection.execute(_SWEEP).scalars().all()
        wake_waiters(connection, sorted(set(names)))
        return len(names)


_SWEEP = text(
    "DELETE FROM semaphore_holders WHERE (limit_name, holder) IN (SELECT limit_name, holder FROM semaphore_holders h"
    " WHERE expires_at <= clock_timestamp()"
    " OR EXISTS (SELECT FROM attempts a WHERE a.id = h.attempt_id"
    " AND a.state NOT IN ('dispatched', 'running', 'grading'))"
    " OR EXISTS (SELECT FROM instances i WHERE i.id = h.instance_id AND i.state IN ('terminated', 'failed'))"
    " FOR UPDATE SKIP LOCKED) RETURNING limit_name"
)
