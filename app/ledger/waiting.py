"""What waits and what is free: the dispatcher's view of the ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from app.ledger import attempts
from app.ledger.attempts import RetryPolicy
from app.models.endings import EndReason
from app.models.outcome import Failure
from app.models.spec import Mode


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task that may be admitted now, in the order of priority, then arrival."""

    task_id: UUID
    mode: Mode  # as asked for; may be AUTO
    resource_class: str


def candidates(connection: Connection, mode: Mode, limit: int) -> list[Candidate]:
    """The first `limit` tasks in line of those that asked for `mode`: a full mode must not hide another's tasks."""
    rows = connection.execute(
        text(
            "SELECT id, requested_mode, resource_class FROM tasks WHERE state = 'pending'"
            " AND requested_mode = :mode AND available_at <= clock_timestamp() AND cancel_requested_at IS NULL"
            " ORDER BY priority DESC, accepted_at, id LIMIT :limit"
        ),
        {"mode": mode.value, "limit": limit},
    )
    return [Candidate(row.id, Mode(row.requested_mode), row.resource_class) for row in rows]


Key = tuple[Mode, str]
"""A mode and a resource class."""


STILLBORN_S = 30.0
"""How far back one looks for instances that never became ready."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who holds what, by mode and class."""

    live: Counter[Key]  # attempts dispatched or running
    unclaimed: Counter[Key]  # attempts dispatched
    coming: Counter[Key]  # instances not yet at work: requested, booting, ready without an attempt
    instances: Counter[Key]  # instances that have not ended
    slots: Counter[Key]  # slots of instances that take work
    stillborn: Counter[Key]  # instances that died before they were ready, lately, while none of their kind became ready


def occupancy(connection: Connection) -> Occupancy:
    """One consistent look at attempts and instances."""
    found = Occupancy(Counter(), Counter(), Counter(), Counter(), Counter(), Counter())
    for row in connection.execute(
        text(
            "SELECT mode, resource_class, count(*) AS live, count(*) FILTER (WHERE state = 'dispatched') AS unclaimed"
            " FROM attempts WHERE state IN ('dispatched', 'running') GROUP BY 1, 2"
        )
    ):
        key = (Mode(row.mode), row.resource_class)
        found.live[key], found.unclaimed[key] = row.live, row.unclaimed
    for row in connection.execute(
        text(
            "SELECT mode, resource_class, count(*) AS instances,"
            " count(*) FILTER (WHERE state IN ('requested', 'booting', 'ready')) AS coming,"
            " coalesce(sum(slots) FILTER (WHERE state = 'ready'), 0) AS slots"
            " FROM instances WHERE state NOT IN ('terminated', 'failed') GROUP BY 1, 2"
        )
    ):
        key = (Mode(row.mode), row.resource_class)
        found.coming[key], found.instances[key], found.slots[key] = row.coming, row.instances, int(row.slots)
    for row in connection.execute(
        text(
            "SELECT mode, resource_class, count(*) AS stillborn FROM instances"
            " WHERE handle IS NOT NULL AND requested_at > clock_timestamp() - make_interval(secs => :s) GROUP BY 1, 2"
            " HAVING bool_and(ready_at IS NULL AND state = 'failed')"
        ),
        {"s": STILLBORN_S},
    ):
        found.stillborn[Mode(row.mode), row.resource_class] = row.stillborn
    return found


def reclaim_lapsed(connection: Connection, retry: RetryPolicy) -> list[UUID]:
    """Take attempts away whose lease has lapsed or whose deadline has passed; returns those taken."""
    lapsed = connection.execute(
        text("SELECT attempt_id FROM leases WHERE expires_at < clock_timestamp() FOR UPDATE SKIP LOCKED")
    ).scalars()
    failure = Failure(error="StaleWriter", message="its worker stopped renewing the lease")
    taken = attempts.lose(connection, list(lapsed), failure, EndReason.LOST, retry)
    overdue = connection.execute(
        text("SELECT id FROM attempts WHERE state = 'running' AND deadline_at < clock_timestamp()")
    ).scalars()
    failure = Failure(error="EnvironmentFailed", message="the attempt outlived its deadline and was stopped")
    return taken + attempts.lose(connection, list(overdue), failure, EndReason.DEADLINE, retry)
