"""The life of an instance in the ledger: requested, ready, gone. What it left behind: `sweeps`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text
from uuid_utils import compat as uuids

from app.ledger import ends, events
from app.ledger.database import Database
from app.models.endings import EndReason, RetryPolicy
from app.models.outcome import Failure
from app.models.spec import Mode
from app.models.states import InstanceState

INTERRUPTED_EXIT = 75
"""Exit code (EX_TEMPFAIL) of a worker that was told to stop and gave its attempts back."""


@dataclass(frozen=True, slots=True)
class InstanceDemand:
    """One kind of instance, and how many more of it are wanted."""

    provider: str
    mode: Mode
    resource_class: str
    slots: int
    count: int
    lifetime_s: float | None


_REQUEST = text("""
WITH asked AS (
    INSERT INTO instances (id, provider, mode, resource_class, slots, deadline_at)
    SELECT id, :provider, :mode, :resource_class, :slots,
        clock_timestamp() + make_interval(secs => CAST(:lifetime AS float8))
    FROM unnest(CAST(:ids AS uuid[])) AS id RETURNING id, mode
)
INSERT INTO events (kind, instance_id, data)
SELECT 'instance.requested', id, jsonb_build_object('mode', mode, 'class', CAST(:resource_class AS text)) FROM asked
""")


def request(connection: Connection, wanted: InstanceDemand) -> list[UUID]:
    """Write the rows of instances about to be asked for; a crash in between leaves rows that are asked for again."""
    ids = [uuids.uuid7() for _ in range(wanted.count)]
    connection.execute(
        _REQUEST,
        {
            "ids": ids,
            "provider": wanted.provider,
            "mode": wanted.mode.value,
            "resource_class": wanted.resource_class,
            "slots": wanted.slots,
            "lifetime": wanted.lifetime_s,
        },
    )
    return ids


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """An instance whose row was written, and of which no provider has said that it has it."""

    id: UUID
    provider: str
    mode: Mode
    resource_class: str
    slots: int
    lifetime_s: float | None


def pending_requests(connection: Connection, older_than_s: float, limit: int) -> list[PendingRequest]:
    """Requested this long ago and never started, as far as we know: to be asked for again, which is safe."""
    rows = connection.execute(
        text(
            "SELECT id, provider, mode, resource_class, slots,"
            " extract(epoch FROM deadline_at - clock_timestamp())::float8 AS lifetime_s"
            " FROM instances WHERE state = 'requested' AND handle IS NULL"
            " AND requested_at < clock_timestamp() - make_interval(secs => :age) ORDER BY id LIMIT :limit"
        ),
        {"age": older_than_s, "limit": limit},
    )
    return [PendingRequest(r.id, r.provider, Mode(r.mode), r.resource_class, r.slots, r.lifetime_s) for r in rows]


def launched(database: Database, handles: dict[UUID, str]) -> None:
    """The provider has them. An instance that is ready already (it was quick) keeps its state."""
    if not handles:
        return
    with database.begin() as connection:
        connection.execute(
            text(
                "WITH mine AS MATERIALIZED (SELECT id FROM instances WHERE id = ANY(CAST(:ids AS uuid[]))"
                " ORDER BY id FOR UPDATE)"
                " UPDATE instances i SET handle = h.handle,"
                " state = CASE WHEN i.state = 'requested' THEN 'booting' ELSE i.state END"
                " FROM unnest(CAST(:ids AS uuid[]), CAST(:handles AS text[])) AS h(id, handle)"
                " JOIN mine ON mine.id = h.id WHERE i.id = h.id AND i.handle IS DISTINCT FROM h.handle"
            ),
            {"ids": list(handles), "handles": list(handles.values())},
        )


_READY = text("""
WITH mine AS MATERIALIZED (
    SELECT id FROM instances WHERE id = ANY(CAST(:ids AS uuid[])) AND state IN ('requested', 'booting')
    ORDER BY id FOR UPDATE
), moved AS (
    UPDATE instances i SET state = 'ready', ready_at = clock_timestamp(), seen_at = clock_timestamp()
    FROM mine WHERE i.id = mine.id RETURNING i.id
), facts AS (
    INSERT INTO events (kind, instance_id) SELECT 'instance.ready', id FROM moved
)
SELECT id FROM moved
""")


def ready_many(database: Database, ids: Sequence[UUID]) -> set[UUID]:
    """Their workers listen. What is missing in the answer is not expected any more, and must leave."""
    with database.begin() as connection:
        moved = set(connection.execute(_READY, {"ids": list(ids)}).scalars())
        if moved:
            events.wake_dispatcher(connection)
        # An answer that was lost on its way: ready already is as good.
        return moved | set(
            connection.execute(
                text("SELECT id FROM instances WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'ready'"),
                {"ids": [i for i in ids if i not in moved]},
            ).scalars()
        )


def ready(database: Database, instance_id: UUID) -> bool:
    """Its worker listens. False when nobody expects it any more: then it must leave."""
    return instance_id in ready_many(database, [instance_id])


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


def seen(database: Database, instance_id: UUID) -> InstanceState | None:
    """A sign of life; the state in which the ledger has it. None or an end: the worker must leave.

    `DRAINING`: it finishes what it has, takes nothing new, and leaves.
    """
    with database.begin() as connection:
        row = connection.execute(
            text(
                "UPDATE instances SET seen_at = clock_timestamp()"
                " WHERE id = :id AND state NOT IN ('terminated', 'failed') RETURNING state"
            ),
            {"id": instance_id},
        ).first()
    return None if row is None else InstanceState(row.state)


def seen_many(database: Database, instance_ids: Sequence[UUID]) -> dict[UUID, InstanceState]:
    """Signs of life of many; those that have ended or never were are missing."""
    with database.begin() as connection:
        rows = connection.execute(
            text(
                "WITH mine AS MATERIALIZED (SELECT id FROM instances WHERE id = ANY(CAST(:ids AS uuid[]))"
                " AND state NOT IN ('terminated', 'failed') ORDER BY id FOR UPDATE)"
                " UPDATE instances i SET seen_at = clock_timestamp() FROM mine WHERE i.id = mine.id"
                " RETURNING i.id, i.state"
            ),
            {"ids": list(instance_ids)},
        )
        return {row.id: InstanceState(row.state) for row in rows}


_DRAIN = text("""
WITH moved AS (
    UPDATE instances SET state = 'draining', draining_why = coalesce(draining_why, :why)
    WHERE id = ANY(CAST(:ids AS uuid[])) AND state IN ('booting', 'ready', 'busy') RETURNING id
), closed AS (
    UPDATE instances SET state = 'terminated', ended_at = clock_timestamp(), draining_why = :why
    WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'requested' RETURNING id
), facts AS (
    INSERT INTO events (kind, instance_id, data)
    SELECT kind, id, jsonb_build_object('why', CAST(:why AS text))
    FROM (SELECT 'instance.draining' AS kind, id FROM moved UNION ALL SELECT 'instance.terminated', id FROM closed) d
)
SELECT id FROM moved UNION ALL SELECT id FROM closed
""")


def drain(database: Database, instance_ids: Sequence[UUID], why: str) -> list[UUID]:
    """They finish what they have, take nothing new, and leave; the first reason is kept. Which were moved.

    One that has only been requested is closed; should its provider have started it, it is told to leave.
    """
    with database.begin() as connection:
        moved = list(connection.execute(_DRAIN, {"ids": list(instance_ids), "why": why}).scalars())
        if moved:
            events.wake_dispatcher(connection)
        return moved


@dataclass(frozen=True, slots=True)
class Exit:
    """An instance that is gone. `exit_code`: of its worker; None: nobody knows."""

    instance_id: UUID
    exit_code: int | None
    why: str


_EXIT = text("""
WITH gone AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:codes AS int[]), CAST(:whys AS text[])) AS g(id, code, why)
), mine AS MATERIALIZED (
    SELECT i.id FROM instances i JOIN gone g ON g.id = i.id WHERE i.state NOT IN ('terminated', 'failed')
    ORDER BY i.id FOR UPDATE OF i
), closed AS (
    UPDATE instances i SET exit_code = g.code, ended_at = clock_timestamp(),
        state = CASE WHEN g.code IN (0, :interrupted) THEN 'terminated' ELSE 'failed' END
    FROM gone g JOIN mine ON mine.id = g.id WHERE i.id = g.id
    RETURNING i.id, i.state, g.code, g.why
), facts AS (
    INSERT INTO events (kind, instance_id, data)
    SELECT 'instance.' || state, id, jsonb_build_object('exit_code', code, 'why', why) FROM closed
), left_line AS (
    DELETE FROM semaphore_holders h USING closed WHERE h.instance_id = closed.id
)
SELECT id, code, why FROM closed
""")


def exited_many(database: Database, exits: Sequence[Exit], retry: RetryPolicy) -> set[UUID]:
    """Instances are gone: close their rows, take their attempts back. Those that were not closed before."""
    if not exits:
        return set()
    values = {
        "ids": [e.instance_id for e in exits],
        "codes": [e.exit_code for e in exits],
        "whys": [e.why for e in exits],
        "interrupted": INTERRUPTED_EXIT,
    }
    with database.begin() as connection:
        closed = connection.execute(_EXIT, values).all()
        if closed:
            _take_back(connection, {row.id: (row.code, row.why) for row in closed}, retry)
            events.wake_dispatcher(connection)
    return {row.id for row in closed}


def exited(database: Database, instance_id: UUID, exit_code: int | None, why: str, retry: RetryPolicy) -> bool:
    """The instance is gone: close its row, take its attempts back. False when that was known already."""
    return bool(exited_many(database, [Exit(instance_id, exit_code, why)], retry))


def _take_back(connection: Connection, gone: dict[UUID, tuple[int | None, str]], retry: RetryPolicy) -> None:
    running: dict[UUID, list[UUID]] = defaultdict(list)
    for row in connection.execute(
        text(
            "SELECT id, instance_id FROM attempts WHERE instance_id = ANY(CAST(:ids AS uuid[])) AND state = 'running'"
        ),
        {"ids": list(gone)},
    ):
        running[row.instance_id].append(row.id)
    for instance_id, attempt_ids in running.items():
        code, why = gone[instance_id]
        reason = EndReason.INTERRUPTED if code == INTERRUPTED_EXIT else EndReason.LOST
        failure = Failure(error="InstanceFailed", message=f"its instance is gone: {why}")
        company = len(attempt_ids) > 1 and reason is EndReason.LOST
        ends.lose(connection, attempt_ids, failure, reason, retry, company=company)


def least_busy(connection: Connection, resource_class: str, most: int) -> list[UUID]:
    """Standing instances of a class that could leave at the least cost: those that run least, the newest first."""
    rows = connection.execute(
        text(
            "SELECT i.id FROM instances i WHERE i.mode = 'persistent' AND i.resource_class = :class"
            " AND i.state = 'ready' AND i.provider <> 'static' ORDER BY"
            " (SELECT count(*) FROM attempts a WHERE a.instance_id = i.id AND a.finished_at IS NULL),"
            " i.ready_at DESC LIMIT :most"
        ),
        {"class": resource_class, "most": most},
    )
    return list(rows.scalars())


def failing(connection: Connection, in_a_row: int) -> list[UUID]:
    """Standing instances whose last so many attempts, of several tasks, all ended for reasons that lie with them.

    A model that does not answer, or a ledger too slow for leases, is not the instance's fault.
    """
    reasons = [EndReason.ENVIRONMENT_ERROR.value, EndReason.GRADING_ERROR.value, EndReason.INFRASTRUCTURE.value]
    rows = connection.execute(
        text(
            "SELECT i.id FROM instances i CROSS JOIN LATERAL (SELECT count(*) AS n,"
            " count(*) FILTER (WHERE l.end_reason = ANY(:reasons)) AS bad, count(DISTINCT l.task_id) AS tasks FROM"
            " (SELECT end_reason, task_id FROM attempts a WHERE a.instance_id = i.id AND a.finished_at IS NOT NULL"
            " ORDER BY a.finished_at DESC LIMIT :most) l) w"
            " WHERE i.mode = 'persistent' AND i.state = 'ready' AND w.n = :most AND w.bad = :most AND w.tasks > 1"
        ),
        {"reasons": reasons, "most": in_a_row},
    )
    return list(rows.scalars())


def outlived(connection: Connection, grace_s: float) -> list[tuple[UUID, str, str | None]]:
    """Ephemeral instances whose one attempt ended so long ago and that are still there: id, provider, handle."""
    rows = connection.execute(
        text(
            "SELECT i.id, i.provider, i.handle FROM instances i JOIN attempts a ON a.id = i.attempt_id"
            " WHERE i.state IN ('busy', 'draining')"
            " AND a.finished_at < clock_timestamp() - make_interval(secs => :grace)"
        ),
        {"grace": grace_s},
    )
    return [(row.id, row.provider, row.handle) for row in rows]


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


def live_ids(database: Database) -> set[UUID]:
    """Ids of the instances that have not ended."""
    with database.begin() as connection:
        rows = connection.execute(text("SELECT id FROM instances WHERE state NOT IN ('terminated', 'failed')"))
        return set(rows.scalars())
