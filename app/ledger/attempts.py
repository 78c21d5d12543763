"""Claims, renews and records attempts. `app.ledger.ends` has how they end.

Every write carries the attempt's id and number and is conditional on its state; a writer that comes late gets
`StaleWriter` and must stop. The verbs take many at once, in one statement; those for one are the same with
a list of one.

Locks are taken in one order, so that no two writers wait for each other: instance, attempt, task.
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
    grading: int = 0  # which claim of its grading; 0: the attempt itself


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """An instance that would take the attempt that the message names."""

    message: WakeUpMessage
    instance_id: UUID


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A phase that an attempt reaches now. `waits`: seconds waited by limit; `cost_usd`: of its model calls so far."""

    claimed: Claim
    phase: Phase
    environment: Mapping[str, Any] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    cost_usd: float | None = None


# --- Claim and lease ------------------------------------------------------------------------------------------------

# An ephemeral instance is locked by the claim and takes one attempt in its life: the row says which.
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
    """Give attempts to the instances that ask for them, each with a lease. What cannot be had is left out.

    Raises: DatabaseUnavailable: it may have been done all the same; `held_by` tells.
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
    """Take an attempt for an instance, with a lease; None when there is nothing to take (a stale or doubled message).

    Raises: as `claim_many`.
    """
    return next(iter(claim_many(database, [ClaimRequest(message, instance_id)], lease_s=lease_s)), None)


def claim_any(database: Database, instance_id: UUID, *, lease_s: float) -> Claim | None:
    """Take the oldest attempt that waits for an instance like this one: the answer to a stale message.

    What is on its way to another host is left to it, and to the dispatcher, which soon offers it to all.
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
    """What the ledger believes this instance to be working on: the answer to a claim that ended in an error."""
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
    """The claims that such rows are, with their specs."""
    specs = {digest: spec for digest in {row.spec_digest for row in rows} if (spec := _specs.get(digest)) is not None}
    if unknown := [row.spec_digest for row in rows if row.spec_digest not in specs]:
        found = sql(connection, "SELECT digest, body FROM specs WHERE digest = ANY(:digests)", {"digests": unknown})
        read = {row.digest: TaskSpec.model_validate_json(row.body) for row in found}
        specs |= read
        _specs.update(read)
        for oldest in list(_specs)[:-_MOST_SPECS]:
            _specs.pop(oldest, None)
    return [_claim(row, specs[row.spec_digest]) for row in rows]


def _claim(row: Row[Any], spec: TaskSpec) -> Claim:
    mode, ids = Mode(row.mode), (row.task_id, row.run_id, row.instance_id)
    return Claim(row.id, row.number, *ids, mode, row.deadline_at, spec, row._mapping.get("grading", 0))


_specs: dict[str, TaskSpec] = {}
"""Specs by digest, parsed once for all the replicas that this process carries out; a digest never changes meaning."""
_MOST_SPECS = 256


def renew(
    database: Database, attempt_ids: Sequence[UUID], *, lease_s: float, instance_id: UUID | None = None
) -> dict[UUID, EndReason | None]:
    """Renew leases in one statement: {attempt: why it must stop, or None}. What is missing has lost its lease.

    instance_id: those that this instance holds. An attempt is one instance's alone, but its grading may go to another.
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
        answers = rows.all()
        semaphores.renew_of(connection, [row.attempt_id for row in answers], lease_s=lease_s)
        return {row.attempt_id: EndReason(row.cancel_reason or "cancelled") if row.stop else None for row in answers}


_FAULTS = [reason.value for reason, blame in BLAME.items() if blame is Blame.INFRASTRUCTURE]


def failed_before(database: Database, claimed: Claim, error: str) -> bool:
    """Whether a failure of this class (`Failure.error`) is among the faults that its task has had.

    Those before the task was put back in line by a person do not count. Raises: DatabaseUnavailable.
    """
    found = database.sql(
        "SELECT 1 FROM tasks t, (SELECT failure, row_number() OVER (ORDER BY number DESC) AS back"
        " FROM attempts WHERE task_id = :task AND number < :number AND end_reason = ANY(:faults)) a"
        " WHERE t.id = :task AND a.back <= t.faults AND a.failure->>'error' = :error LIMIT 1",
        {"task": claimed.task_id, "number": claimed.number, "error": error, "faults": _FAULTS},
    )
    return found.first() is not None


# --- Phases ---------------------------------------------------------------------------------------------------------

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
    """Record that attempts reached phases now; returns the attempts whose writer was still the current one.

    Of several records of one attempt in a call, the first may bring environment and waits.
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
    """Record that the attempt reached a phase now. Raises: StaleWriter."""
    if not record_phases(database, [PhaseRecord(claimed, phase, environment or {}, waits or {}, cost_usd)]):
        raise stale(claimed)


def stale(claimed: Claim) -> StaleWriter:
    """What a writer hears whose attempt has been taken away."""
    return StaleWriter(f"attempt {claimed.number} of task {claimed.task_id} is no longer the current one")
