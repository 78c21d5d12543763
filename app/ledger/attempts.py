"""Claims, renews and records attempts. `app.ledger.ends` ends them.

Every write carries the attempt's id and number and is conditional on its state; a late writer gets `StaleWriter` and
must stop. The functions for many attempts use one statement; those for one attempt call them with a list of one.

Locks are acquired in one order, to avoid deadlocks between writers: instance, attempt, task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import StaleWriter
from app.ledger import semaphores
from app.ledger.database import Database, sql
from app.models.endings import BLAME, Blame, EndReason
from app.models.outcome import Phase, WakeUpMessage
from app.models.spec import Mode, TaskSpec


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to carry out one attempt, or its grading, and everything that is needed to do it."""

    attempt_id: UUID
    number: int
    task_id: UUID
    run_id: UUID
    instance_id: UUID
    mode: Mode
    deadline_at: datetime
    spec: TaskSpec
    grading: int = 0  # number of the grading's claim; 0: claim of the attempt itself


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """An instance's request to claim the attempt named in the message."""

    message: WakeUpMessage
    instance_id: UUID


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A phase that an attempt reaches now. `waits`: seconds per limit; `cost_usd`: cost of its model calls so far."""

    claimed: Claim
    phase: Phase
    environment: Mapping[str, Any] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    cost_usd: float | None = None


# The claim locks an ephemeral instance. Such an instance runs only one attempt; its row has the attempt's id.
_CLAIM = text("""
WITH requests AS (
    SELECT * FROM unnest(CAST(:attempts AS uuid[]), CAST(:numbers AS int[]), CAST(:instances AS uuid[]))
        AS r(attempt_id, number, instance_id)
), free AS MATERIALIZED (
    SELECT id, mode, resource_class, ready_at FROM instances
    WHERE id = ANY(CAST(:instances AS uuid[])) AND state = 'ready' AND attempt_id IS NULL ORDER BY id FOR UPDATE
), open AS MATERIALIZED (
    SELECT id FROM attempts WHERE id = ANY(CAST(:attempts AS uuid[])) AND state = 'dispatched'
    ORDER BY id FOR UPDATE
), matched AS (
    SELECT DISTINCT ON (CASE WHEN s.mode = 'ephemeral' THEN s.id ELSE r.attempt_id END)
        r.attempt_id, r.number, s.id AS instance_id, s.mode, s.resource_class, s.ready_at
    FROM requests r JOIN free s ON s.id = r.instance_id JOIN open w ON w.id = r.attempt_id
), claimed AS (
    UPDATE attempts a SET state = 'running', instance_id = m.instance_id, claimed_at = clock_timestamp(),
        deadline_at = clock_timestamp() + make_interval(secs => t.lifetime_s),
        phases = a.phases || jsonb_build_object('instance_ready', m.ready_at, 'claimed', clock_timestamp())
    FROM matched m, tasks t
    WHERE a.id = m.attempt_id AND a.number = m.number AND a.mode = m.mode AND a.resource_class = m.resource_class
        AND t.id = a.task_id AND t.state = 'admitted' AND t.attempts = a.number AND t.cancel_requested_at IS NULL
    RETURNING a.id, a.number, a.task_id, a.mode, a.deadline_at, a.instance_id, t.run_id, t.spec_digest
), moved AS (
    UPDATE tasks t SET state = 'running' FROM claimed WHERE t.id = claimed.task_id
), busy AS (
    UPDATE instances i SET state = 'busy', attempt_id = claimed.id
    FROM claimed WHERE i.id = claimed.instance_id AND claimed.mode = 'ephemeral'
), leased AS (
    INSERT INTO leases (attempt_id, instance_id, expires_at)
    SELECT id, instance_id, clock_timestamp() + make_interval(secs => :lease) FROM claimed
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id)
    SELECT 'attempt.claimed', run_id, task_id, id, instance_id FROM claimed
)
SELECT * FROM claimed
""")


def claim_many(database: Database, requests: Sequence[ClaimRequest], *, lease_s: float) -> list[Claim]:
    """Claims attempts for the requesting instances, each with a lease. Attempts that cannot be claimed are left out.

    Raises: DatabaseUnavailable: the claims may have been committed; check with `held_by`.
    """
    if not requests:
        return []
    values = {
        "attempts": [request.message.attempt_id for request in requests],
        "numbers": [request.message.number for request in requests],
        "instances": [request.instance_id for request in requests],
        "lease": lease_s,
    }
    with database.begin() as connection:
        return claims_of(connection, connection.execute(_CLAIM, values).all())


def claim(database: Database, message: WakeUpMessage, instance_id: UUID, *, lease_s: float) -> Claim | None:
    """Claims an attempt for an instance, with a lease; None: nothing to claim (a stale or duplicate message).

    Raises: as `claim_many`.
    """
    return next(iter(claim_many(database, [ClaimRequest(message, instance_id)], lease_s=lease_s)), None)


def claim_any(database: Database, instance_id: UUID, *, lease_s: float) -> Claim | None:
    """Claims the oldest attempt that waits for this instance's mode and class; used after a stale message.

    Skips attempts queued for another host: it claims them, or the dispatcher soon moves them to the common queue.
    """
    row = database.sql(
        "SELECT a.id, a.number FROM attempts a JOIN instances i"
        " ON i.mode = a.mode AND i.resource_class = a.resource_class"
        " WHERE i.id = :instance_id AND i.state = 'ready' AND a.state = 'dispatched'"
        " AND (a.queue_host IS NULL OR a.queue_host = i.host) ORDER BY a.dispatched_at LIMIT 1"
        " FOR UPDATE OF a SKIP LOCKED",
        {"instance_id": instance_id},
    ).first()
    if row is None:
        return None
    return claim(database, WakeUpMessage(attempt_id=row.id, number=row.number), instance_id, lease_s=lease_s)


def held_by(database: Database, instance_id: UUID) -> list[Claim]:
    """Returns the claims that this instance holds according to the ledger; used after a claim that raised an error."""
    with database.begin() as connection:
        rows = sql(
            connection,
            "SELECT a.id, a.number, a.task_id, a.mode, a.deadline_at, a.instance_id, t.run_id, t.spec_digest"
            " FROM attempts a JOIN tasks t ON t.id = a.task_id JOIN leases l ON l.attempt_id = a.id"
            " WHERE a.instance_id = :id AND a.state = 'running'",
            {"id": instance_id},
        ).all()
        return claims_of(connection, rows)


def claims_of(connection: Connection, rows: Sequence[Row[Any]]) -> list[Claim]:
    """Converts rows of claimed attempts to claims, with their specs."""
    specs = {digest: spec for digest in {row.spec_digest for row in rows} if (spec := _specs.get(digest)) is not None}
    if unknown := [row.spec_digest for row in rows if row.spec_digest not in specs]:
        bodies = sql(connection, "SELECT digest, body FROM specs WHERE digest = ANY(:digests)", {"digests": unknown})
        parsed = {row.digest: TaskSpec.model_validate_json(row.body) for row in bodies}
        specs |= parsed
        _specs.update(parsed)
        for oldest in list(_specs)[:-_MOST_SPECS]:
            _specs.pop(oldest, None)
    return [_claim(row, specs[row.spec_digest]) for row in rows]


def _claim(row: Row[Any], spec: TaskSpec) -> Claim:
    mode, ids = Mode(row.mode), (row.task_id, row.run_id, row.instance_id)
    return Claim(row.id, row.number, *ids, mode, row.deadline_at, spec, row._mapping.get("grading", 0))


_specs: dict[str, TaskSpec] = {}
"""Cache of parsed specs by digest, shared by all replicas in this process; a digest's content never changes."""
_MOST_SPECS = 256


def renew(
    database: Database, attempt_ids: Sequence[UUID], *, lease_s: float, instance_id: UUID | None = None
) -> dict[UUID, EndReason | None]:
    """Renews leases in one statement: {attempt: reason to stop, or None}. Attempts not in it have lost their lease.

    instance_id: renew only leases of this instance. An attempt stays on one instance; its grading may go to another.
    """
    with database.begin() as connection:
        rows = sql(
            connection,
            "UPDATE leases l SET expires_at = clock_timestamp() + make_interval(secs => :lease)"
            " FROM attempts a JOIN tasks t ON t.id = a.task_id"
            " WHERE l.attempt_id = ANY(:ids) AND a.id = l.attempt_id AND a.state IN ('running', 'grading')"
            " AND (CAST(:instance AS uuid) IS NULL OR l.instance_id = :instance)"
            " RETURNING l.attempt_id, t.cancel_requested_at IS NOT NULL AS stop, t.cancel_reason",
            {"ids": list(attempt_ids), "lease": lease_s, "instance": instance_id},
        )
        renewed = rows.all()
        semaphores.renew_of(connection, [row.attempt_id for row in renewed], lease_s=lease_s)
        return {row.attempt_id: EndReason(row.cancel_reason or "cancelled") if row.stop else None for row in renewed}


_FAULTS = [reason.value for reason, blame in BLAME.items() if blame is Blame.INFRASTRUCTURE]


def failed_before(database: Database, claimed: Claim, error: str) -> bool:
    """Whether a failure of this class (`Failure.error`) is among the earlier faults of the task.

    Faults from before a user queued the task again do not count. Raises: DatabaseUnavailable.
    """
    rows = database.sql(
        "SELECT 1 FROM tasks t, (SELECT failure, row_number() OVER (ORDER BY number DESC) AS back"
        " FROM attempts WHERE task_id = :task AND number < :number AND end_reason = ANY(:faults)) a"
        " WHERE t.id = :task AND a.back <= t.faults AND a.failure->>'error' = :error LIMIT 1",
        {"task": claimed.task_id, "number": claimed.number, "error": error, "faults": _FAULTS},
    )
    return rows.first() is not None


_RECORD = text("""
WITH reached AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:numbers AS int[]), CAST(:phases AS text[]),
        CAST(:environments AS jsonb[]), CAST(:waits AS jsonb[]), CAST(:costs AS float8[]), CAST(:gradings AS int[]))
        WITH ORDINALITY AS p(id, number, phase, environment, waits, cost, grading, ord)
), each AS (
    SELECT id, number, grading, jsonb_object_agg(phase, clock_timestamp()) AS phases, max(cost) AS cost,
        (array_agg(environment ORDER BY ord))[1] AS environment, (array_agg(waits ORDER BY ord))[1] AS waits
    FROM reached GROUP BY id, number, grading
), mine AS MATERIALIZED (
    SELECT a.id, coalesce(a.cost_usd, 0) AS had FROM attempts a JOIN each e ON e.id = a.id AND e.number = a.number
    WHERE a.state = CASE e.grading WHEN 0 THEN 'running' ELSE 'grading' END AND a.gradings = e.grading
    ORDER BY a.id FOR UPDATE OF a
), moved AS (
    UPDATE attempts a SET phases = a.phases || e.phases, environment = a.environment || e.environment,
        waits = a.waits || e.waits, cost_usd = coalesce(e.cost, a.cost_usd)
    FROM each e JOIN mine ON mine.id = e.id, tasks t
    WHERE a.id = e.id AND t.id = a.task_id
    RETURNING a.id, a.task_id, a.instance_id, t.run_id, a.user_name, e.cost - mine.had AS cost
), spent AS (
    INSERT INTO accounts (user_name, spent_usd) SELECT user_name, sum(cost) FROM moved WHERE cost > 0
    GROUP BY user_name ORDER BY user_name
    ON CONFLICT (user_name) DO UPDATE SET spent_usd = accounts.spent_usd + excluded.spent_usd
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id, data)
    SELECT 'attempt.' || p.phase, m.run_id, m.task_id, m.id, m.instance_id, p.environment
    FROM moved m JOIN reached p ON p.id = m.id ORDER BY p.ord
)
SELECT id FROM moved
""")


def record_phases(database: Database, records: Sequence[PhaseRecord]) -> set[UUID]:
    """Records that attempts reached phases now; returns the attempts whose writer was still the current one.

    With several records of one attempt in a call, only the first one's environment and waits are stored.
    """
    if not records:
        return set()
    values = {
        "ids": [p.claimed.attempt_id for p in records],
        "numbers": [p.claimed.number for p in records],
        "phases": [p.phase.value for p in records],
        "environments": [json.dumps(dict(p.environment)) for p in records],
        "waits": [json.dumps(dict(p.waits)) for p in records],
        "costs": [p.cost_usd for p in records],
        "gradings": [p.claimed.grading for p in records],
    }
    return set(database.sql(_RECORD, values).scalars())


def record_phase(
    database: Database,
    claimed: Claim,
    phase: Phase,
    *,
    environment: Mapping[str, Any] | None = None,
    waits: Mapping[str, float] | None = None,
    cost_usd: float | None = None,
) -> None:
    """Records that the attempt reached a phase now. Raises: StaleWriter."""
    if not record_phases(database, [PhaseRecord(claimed, phase, environment or {}, waits or {}, cost_usd)]):
        raise stale(claimed)


def stale(claimed: Claim) -> StaleWriter:
    """Returns the error for a writer whose attempt is no longer the current one."""
    return StaleWriter(f"attempt {claimed.number} of task {claimed.task_id} is no longer the current one")
