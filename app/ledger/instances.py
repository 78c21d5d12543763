"""Records the life of an instance: requested, ready, ended, and whether its host was swept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, insert, text
from uuid_utils import compat as uuids

from app.errors import AmbiguousName, UnknownName
from app.ledger import ends, events, gradings
from app.ledger.database import Database, sql
from app.models.endings import EndReason, RetryPolicy
from app.models.instance import InstanceMode
from app.models.outcome import Failure
from app.models.states import InstanceState
from app.models.tables import InstanceRow

INTERRUPTED_EXIT = 75
"""Exit code (EX_TEMPFAIL) of a worker that stopped on request and gave its attempts back."""


@dataclass(frozen=True, slots=True)
class InstanceDemand:
    """Request for `count` instances of one provider, mode and class."""

    provider: str
    mode: InstanceMode
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
    """Inserts rows of instances before the provider is called; after a crash in between, these are requested again."""
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


def pending_requests(connection: Connection, older_than_s: float, limit: int) -> list[tuple[UUID, InstanceDemand]]:
    """Returns requests this old that never started, as far as the ledger knows: safe to request again."""
    rows = sql(
        connection,
        "SELECT id, provider, mode, resource_class, slots,"
        " extract(epoch FROM deadline_at - clock_timestamp())::float8 AS lifetime_s"
        " FROM instances WHERE state = 'requested' AND handle IS NULL"
        " AND requested_at < clock_timestamp() - make_interval(secs => :age) ORDER BY id LIMIT :limit",
        {"age": older_than_s, "limit": limit},
    )
    return [
        (r.id, InstanceDemand(r.provider, InstanceMode(r.mode), r.resource_class, r.slots, 1, r.lifetime_s))
        for r in rows
    ]


def launched(database: Database, handles: dict[UUID, str]) -> None:
    """Records the provider's handles. An instance that is ready already keeps its state."""
    if not handles:
        return
    database.sql(
        "WITH mine AS MATERIALIZED (SELECT id FROM instances WHERE id = ANY(CAST(:ids AS uuid[]))"
        " ORDER BY id FOR UPDATE)"
        " UPDATE instances i SET handle = h.handle,"
        " state = CASE WHEN i.state = 'requested' THEN 'booting' ELSE i.state END"
        " FROM unnest(CAST(:ids AS uuid[]), CAST(:handles AS text[])) AS h(id, handle)"
        " JOIN mine ON mine.id = h.id WHERE i.id = h.id AND i.handle IS DISTINCT FROM h.handle",
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
    """Records that workers listen. An instance missing in the result is not expected any more: its worker must exit."""
    with database.begin() as connection:
        moved = set(connection.execute(_READY, {"ids": list(ids)}).scalars())
        if moved:
            events.wake_dispatcher(connection)
        # An instance that is ready already counts too: its first answer may have been lost.
        return moved | set(
            sql(
                connection,
                "SELECT id FROM instances WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'ready'",
                {"ids": [i for i in ids if i not in moved]},
            ).scalars()
        )


def ready(database: Database, instance_id: UUID) -> bool:
    """Records that an instance's worker listens. False: it is not expected any more, and must exit."""
    return instance_id in ready_many(database, [instance_id])


def register(
    database: Database, instance_id: UUID, *, mode: InstanceMode, resource_class: str, slots: int, handle: str
) -> None:
    """Adds a standing instance that the ledger did not request (a compose service, or one started by hand)."""
    values = {"id": instance_id, "mode": mode.value, "resource_class": resource_class, "slots": slots, "handle": handle}
    database.sql(insert(InstanceRow).values(**values, state="booting"))


def seen(database: Database, instance_id: UUID) -> InstanceState | None:
    """Records a sign of life and returns the state. None: it has ended or is unknown, and the worker must exit.

    `DRAINING`: the worker finishes its attempts, takes no new ones, and exits.
    """
    return seen_many(database, [instance_id]).get(instance_id)


def seen_many(database: Database, instance_ids: Sequence[UUID]) -> dict[UUID, InstanceState]:
    """Records signs of life and returns the states; instances that have ended or are unknown are missing."""
    rows = database.sql(
        "WITH mine AS MATERIALIZED (SELECT id FROM instances WHERE id = ANY(CAST(:ids AS uuid[]))"
        " AND state NOT IN ('terminated', 'failed') ORDER BY id FOR UPDATE)"
        " UPDATE instances i SET seen_at = clock_timestamp() FROM mine WHERE i.id = mine.id"
        " RETURNING i.id, i.state",
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
    """Drains instances: they finish their attempts, take no new ones, and exit. Returns those that changed.

    The first reason stays. A requested instance is closed; if its provider starts it anyway, its worker must exit.
    """
    with database.begin() as connection:
        moved = list(connection.execute(_DRAIN, {"ids": list(instance_ids), "why": why}).scalars())
        if moved:
            events.wake_dispatcher(connection)
        return moved


@dataclass(frozen=True, slots=True)
class Exit:
    """An instance that has exited. `exit_code`: of its worker; None: unknown."""

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
), freed_semaphores AS (
    DELETE FROM semaphore_holders h USING closed WHERE h.instance_id = closed.id
)
SELECT id, code, why FROM closed
""")


def exited_many(database: Database, exits: Sequence[Exit], retry: RetryPolicy) -> set[UUID]:
    """Closes rows of exited instances and takes their attempts and gradings back. Returns those not closed before."""
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
    """Closes the row of an exited instance and takes its attempts back. False: it was closed before."""
    return bool(exited_many(database, [Exit(instance_id, exit_code, why)], retry))


def _take_back(connection: Connection, gone: dict[UUID, tuple[int | None, str]], retry: RetryPolicy) -> None:
    running: dict[UUID, list[UUID]] = defaultdict(list)
    for row in sql(
        connection,
        "SELECT id, instance_id FROM attempts WHERE instance_id = ANY(CAST(:ids AS uuid[])) AND state = 'running'",
        {"ids": list(gone)},
    ):
        running[row.instance_id].append(row.id)
    for instance_id, attempt_ids in running.items():
        code, why = gone[instance_id]
        reason = EndReason.INTERRUPTED if code == INTERRUPTED_EXIT else EndReason.LOST
        failure = Failure(error="InstanceFailed", message=f"its instance is gone: {why}")
        company = len(attempt_ids) > 1 and reason is EndReason.LOST
        ends.lose(connection, attempt_ids, failure, reason, retry, company=company)
    for row in sql(
        connection,
        "SELECT attempt_id, instance_id FROM gradings WHERE instance_id = ANY(CAST(:ids AS uuid[])) ORDER BY 1",
        {"ids": list(gone)},
    ).all():
        code, why = gone[row.instance_id]
        lost = Failure(error="InstanceFailed", message=f"its grader is gone: {why}")
        gradings.lose(connection, [row.attempt_id], None if code == INTERRUPTED_EXIT else lost, retry)


def least_busy(connection: Connection, mode: InstanceMode, resource_class: str, most: int) -> list[UUID]:
    """Returns ready instances of a class that are cheapest to remove: those that run least, the newest first."""
    rows = sql(
        connection,
        "SELECT i.id FROM instances i WHERE i.mode = :mode AND i.resource_class = :class"
        " AND i.state = 'ready' AND i.provider <> 'static' ORDER BY"
        " (SELECT count(*) FROM attempts a WHERE a.instance_id = i.id AND a.finished_at IS NULL"
        " AND a.state <> 'grading') + (SELECT count(*) FROM gradings g WHERE g.instance_id = i.id),"
        " i.ready_at DESC LIMIT :most",
        {"mode": mode.value, "class": resource_class, "most": most},
    )
    return list(rows.scalars())


def failing(connection: Connection, in_a_row: int) -> list[UUID]:
    """Returns ready pool instances whose last `in_a_row` attempts, of several tasks, all failed through the instance.

    A model that does not answer, a ledger too slow for leases, and a failed grading are not the instance's fault.
    """
    reasons = [EndReason.ENVIRONMENT_ERROR.value, EndReason.INFRASTRUCTURE.value]
    rows = sql(
        connection,
        "SELECT i.id FROM instances i CROSS JOIN LATERAL (SELECT count(*) AS n,"
        " count(*) FILTER (WHERE l.end_reason = ANY(:reasons) AND l.gradings = 0) AS bad,"
        " count(DISTINCT l.task_id) AS tasks FROM"
        " (SELECT end_reason, task_id, gradings FROM attempts a"
        " WHERE a.instance_id = i.id AND a.finished_at IS NOT NULL ORDER BY a.finished_at DESC LIMIT :most) l) w"
        " WHERE i.mode = 'persistent' AND i.state = 'ready' AND w.n = :most AND w.bad = :most AND w.tasks > 1",
        {"reasons": reasons, "most": in_a_row},
    )
    return list(rows.scalars())


def outlived(connection: Connection, grace_s: float) -> list[tuple[UUID, str, str | None]]:
    """Returns ephemeral instances (id, provider, handle) that still exist `grace_s` after their attempt has ended or,
    where another instance grades it, after its agent has ended."""
    rows = sql(
        connection,
        "SELECT i.id, i.provider, i.handle FROM instances i JOIN attempts a ON a.id = i.attempt_id"
        " WHERE i.state IN ('busy', 'draining')"
        " AND coalesce((a.phases->>'grading_queued')::timestamptz, a.finished_at)"
        " < clock_timestamp() - make_interval(secs => :grace)",
        {"grace": grace_s},
    )
    return [(row.id, row.provider, row.handle) for row in rows]


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """An instance that has not ended. Ages in seconds."""

    id: UUID
    mode: InstanceMode
    resource_class: str
    provider: str
    handle: str | None
    host: str | None  # None: not reported
    state: str
    slots: int
    used: int  # running attempts and gradings
    age_s: float
    silent_s: float | None  # since its last sign of life; None: there was none yet
    overdue: bool  # past its deadline
    draining_why: str | None
    deadline_at: datetime | None


_LIVE = """
SELECT i.id, i.mode, i.resource_class, i.provider, i.handle, i.host, i.state, i.slots, i.draining_why, i.deadline_at,
    extract(epoch FROM clock_timestamp() - i.requested_at)::float8 AS age_s,
    extract(epoch FROM clock_timestamp() - coalesce(i.seen_at, i.ready_at))::float8 AS silent_s,
    coalesce(i.deadline_at < clock_timestamp(), false) AS overdue,
    (SELECT count(*) FROM attempts a WHERE a.instance_id = i.id AND a.state = 'running')
        + (SELECT count(*) FROM gradings g WHERE g.instance_id = i.id) AS used
FROM instances i WHERE i.state NOT IN ('terminated', 'failed')
"""


def live(database: Database, ids: Sequence[UUID] | None = None) -> list[LiveInstance]:
    """Returns the instances that have not ended, by mode, class and age; only those of `ids` when given."""
    chosen = "" if ids is None else " AND i.id = ANY(:ids)"
    rows = database.sql(
        f"{_LIVE}{chosen} ORDER BY i.mode, i.resource_class, i.requested_at, i.id",
        {} if ids is None else {"ids": list(ids)},
    )
    return [LiveInstance(**{**row._asdict(), "mode": InstanceMode(row.mode)}) for row in rows]


def standing(database: Database) -> dict[UUID, float]:
    """Returns the instances without a provider that have been ready, with the seconds since their last sign of life."""
    rows = database.sql(
        "SELECT id, extract(epoch FROM clock_timestamp() - coalesce(seen_at, ready_at))::float8 FROM instances"
        " WHERE provider = 'static' AND ready_at IS NOT NULL AND state NOT IN ('terminated', 'failed')"
    )
    return {row[0]: row[1] for row in rows}


def draining_why(database: Database, instance_id: UUID) -> str | None:
    """Returns why the instance is draining; None: it is not."""
    return database.sql("SELECT draining_why FROM instances WHERE id = :id", {"id": instance_id}).scalar()


def find(database: Database, name: str) -> UUID:
    """Returns the live instance whose id begins or ends with `name`, or whose handle it is (a pid, a container id).

    Raises: UnknownName; AmbiguousName.
    """
    part = name.lower().replace("-", "")
    ids = list(
        database.sql(
            "SELECT id FROM instances WHERE state NOT IN ('terminated', 'failed')"
            " AND (starts_with(replace(id::text, '-', ''), :wanted)"
            " OR right(replace(id::text, '-', ''), length(:wanted)) = :wanted OR handle = :name) LIMIT 2",
            {"wanted": part, "name": name},
        ).scalars()
    )
    if not ids or not part:
        raise UnknownName(f"unknown live instance {name!r}; `megaflow instances` lists them")
    if len(ids) > 1:
        raise AmbiguousName(f"more than one live instance fits {name!r}; expected more of the id")
    return UUID(str(ids[0]))


def live_ids(database: Database) -> set[UUID]:
    """Returns the ids of the instances that have not ended."""
    rows = database.sql("SELECT id FROM instances WHERE state NOT IN ('terminated', 'failed')")
    return set(rows.scalars())
