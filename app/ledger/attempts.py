"""The life of an attempt in the ledger: claimed, renewed, phase by phase, ended.

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
from app.ledger import events, semaphores
from app.ledger.database import Database
from app.ledger.events import OUTCOME
from app.models.endings import BLAME, Blame, EndReason, RetryPolicy
from app.models.outcome import Artifact, Failure, Hint, Phase, Verdict
from app.models.spec import Mode, TaskSpec


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to carry out one attempt, and everything that is needed to do it."""

    attempt_id: UUID
    number: int
    task_id: UUID
    run_id: UUID
    instance_id: UUID
    mode: Mode
    deadline_at: datetime
    spec: TaskSpec


@dataclass(frozen=True, slots=True)
class Offer:
    """An instance that would take what the hint names."""

    hint: Hint
    instance_id: UUID


@dataclass(frozen=True, slots=True)
class Passage:
    """A door that an attempt passes now. `waits`: seconds waited by limit; `cost_usd`: of its model calls so far."""

    claimed: Claim
    phase: Phase
    environment: Mapping[str, Any] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A graded attempt."""

    claimed: Claim
    end_reason: EndReason
    verdict: Verdict
    artifacts: Sequence[Artifact] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that was not measured. `permanent`: another one would end the same."""

    claimed: Claim
    end_reason: EndReason
    failure: Failure
    artifacts: Sequence[Artifact] = ()
    permanent: bool = False


# --- Claim and lease ------------------------------------------------------------------------------------------------

# An ephemeral instance is locked by the claim and takes one attempt in its life: the row says which.
_CLAIM = text("""
WITH offers AS (
    SELECT * FROM unnest(CAST(:attempts AS uuid[]), CAST(:numbers AS int[]), CAST(:instances AS uuid[]))
        AS o(attempt_id, number, instance_id)
), seats AS MATERIALIZED (
    SELECT id, mode, resource_class, ready_at FROM instances
    WHERE id = ANY(CAST(:instances AS uuid[])) AND state = 'ready' AND attempt_id IS NULL ORDER BY id FOR UPDATE
), wanted AS MATERIALIZED (
    SELECT id FROM attempts WHERE id = ANY(CAST(:attempts AS uuid[])) AND state = 'dispatched'
    ORDER BY id FOR UPDATE
), matched AS (
    SELECT DISTINCT ON (CASE WHEN s.mode = 'ephemeral' THEN s.id ELSE o.attempt_id END)
        o.attempt_id, o.number, s.id AS instance_id, s.mode, s.resource_class, s.ready_at
    FROM offers o JOIN seats s ON s.id = o.instance_id JOIN wanted w ON w.id = o.attempt_id
), taken AS (
    UPDATE attempts a SET state = 'running', instance_id = m.instance_id, claimed_at = clock_timestamp(),
        deadline_at = clock_timestamp() + make_interval(secs => t.lifetime_s),
        phases = a.phases || jsonb_build_object('instance_ready', m.ready_at, 'claimed', clock_timestamp())
    FROM matched m, tasks t
    WHERE a.id = m.attempt_id AND a.number = m.number AND a.mode = m.mode AND a.resource_class = m.resource_class
        AND t.id = a.task_id AND t.state = 'admitted' AND t.attempts = a.number AND t.cancel_requested_at IS NULL
    RETURNING a.id, a.number, a.task_id, a.mode, a.deadline_at, a.instance_id, t.run_id, t.spec_digest
), moved AS (
    UPDATE tasks t SET state = 'running' FROM taken WHERE t.id = taken.task_id
), busy AS (
    UPDATE instances i SET state = 'busy', attempt_id = taken.id
    FROM taken WHERE i.id = taken.instance_id AND taken.mode = 'ephemeral'
), leased AS (
    INSERT INTO leases (attempt_id, instance_id, expires_at)
    SELECT id, instance_id, clock_timestamp() + make_interval(secs => :lease) FROM taken
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id)
    SELECT 'attempt.claimed', run_id, task_id, id, instance_id FROM taken
)
SELECT * FROM taken
""")


def claim_many(database: Database, offers: Sequence[Offer], *, lease_s: float) -> list[Claim]:
    """Give attempts to the instances that offer themselves, each with a lease. What cannot be had is left out.

    Raises: DatabaseUnavailable: it may have been done all the same; `held_by` tells.
    """
    if not offers:
        return []
    values = {
        "attempts": [offer.hint.attempt_id for offer in offers],
        "numbers": [offer.hint.number for offer in offers],
        "instances": [offer.instance_id for offer in offers],
        "lease": lease_s,
    }
    with database.begin() as connection:
        return _claims(connection, connection.execute(_CLAIM, values).all())


def claim(database: Database, hint: Hint, instance_id: UUID, *, lease_s: float) -> Claim | None:
    """Take an attempt for an instance, with a lease; None when there is nothing to take (a stale or doubled hint).

    Raises: as `claim_many`.
    """
    return next(iter(claim_many(database, [Offer(hint, instance_id)], lease_s=lease_s)), None)


def claim_any(database: Database, instance_id: UUID, *, lease_s: float) -> Claim | None:
    """Take the oldest attempt that waits for an instance like this one: the answer to a stale hint."""
    with database.begin() as connection:
        row = connection.execute(
            text(
                "SELECT a.id, a.number FROM attempts a JOIN instances i"
                " ON i.mode = a.mode AND i.resource_class = a.resource_class"
                " WHERE i.id = :instance_id AND i.state = 'ready' AND a.state = 'dispatched' ORDER BY a.dispatched_at"
                " LIMIT 1 FOR UPDATE OF a SKIP LOCKED"
            ),
            {"instance_id": instance_id},
        ).first()
    if row is None:
        return None
    return claim(database, Hint(attempt_id=row.id, number=row.number), instance_id, lease_s=lease_s)


def held_by(database: Database, instance_id: UUID) -> list[Claim]:
    """What the ledger believes this instance to be working on: the answer to a claim that ended in an error."""
    with database.begin() as connection:
        rows = connection.execute(
            text(
                "SELECT a.id, a.number, a.task_id, a.mode, a.deadline_at, a.instance_id, t.run_id, t.spec_digest"
                " FROM attempts a JOIN tasks t ON t.id = a.task_id JOIN leases l ON l.attempt_id = a.id"
                " WHERE a.instance_id = :id AND a.state = 'running'"
            ),
            {"id": instance_id},
        ).all()
        return _claims(connection, rows)


def _claims(connection: Connection, rows: Sequence[Row[Any]]) -> list[Claim]:
    unknown = {row.spec_digest for row in rows} - _specs.keys()
    found = connection.execute(
        text("SELECT digest, body FROM specs WHERE digest = ANY(:digests)"), {"digests": list(unknown)}
    )
    specs = {row.digest: TaskSpec.model_validate_json(row.body) for row in found} if unknown else {}
    return [_claim(row, specs) for row in rows]


def _claim(row: Row[Any], read: Mapping[str, TaskSpec]) -> Claim:
    digest = row.spec_digest
    spec = _specs.get(digest) or read[digest]
    _specs[digest] = spec
    while len(_specs) > _MOST_SPECS:
        _specs.pop(next(iter(_specs)), None)
    mode, ids = Mode(row.mode), (row.task_id, row.run_id, row.instance_id)
    return Claim(row.id, row.number, *ids, mode, row.deadline_at, spec)


_specs: dict[str, TaskSpec] = {}
"""Specs by digest, parsed once for all the replicas that this process carries out; a digest never changes meaning."""
_MOST_SPECS = 256


def renew(database: Database, attempt_ids: Sequence[UUID], *, lease_s: float) -> dict[UUID, EndReason | None]:
    """Renew leases in one statement: {attempt: why it must stop, or None}. What is missing has lost its lease."""
    with database.begin() as connection:
        rows = connection.execute(
            text(
                "UPDATE leases l SET expires_at = clock_timestamp() + make_interval(secs => :lease)"
                " FROM attempts a JOIN tasks t ON t.id = a.task_id"
                " WHERE l.attempt_id = ANY(:ids) AND a.id = l.attempt_id AND a.state = 'running'"
                " RETURNING l.attempt_id, t.cancel_requested_at IS NOT NULL AS stop, t.cancel_reason"
            ),
            {"ids": list(attempt_ids), "lease": lease_s},
        )
        answers = rows.all()
        semaphores.renew_of(connection, attempt_ids, lease_s=lease_s)
        return {row.attempt_id: EndReason(row.cancel_reason or "cancelled") if row.stop else None for row in answers}


# --- Phases ---------------------------------------------------------------------------------------------------------

_PASS = text("""
WITH passed AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:numbers AS int[]), CAST(:phases AS text[]),
        CAST(:environments AS jsonb[]), CAST(:waits AS jsonb[]), CAST(:costs AS float8[]))
        WITH ORDINALITY AS p(id, number, phase, environment, waits, cost, ord)
), each AS (
    SELECT id, number, jsonb_object_agg(phase, clock_timestamp()) AS phases, max(cost) AS cost,
        (array_agg(environment ORDER BY ord))[1] AS environment, (array_agg(waits ORDER BY ord))[1] AS waits
    FROM passed GROUP BY id, number
), mine AS MATERIALIZED (
    SELECT a.id, coalesce(a.cost_usd, 0) AS had FROM attempts a JOIN each e ON e.id = a.id AND e.number = a.number
    WHERE a.state = 'running' ORDER BY a.id FOR UPDATE OF a
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
    FROM moved m JOIN passed p ON p.id = m.id ORDER BY p.ord
)
SELECT id FROM moved
""")


def pass_doors(database: Database, passages: Sequence[Passage]) -> set[UUID]:
    """Record that attempts passed stations' doors now; the attempts whose writer was still the current one.

    Of several passages of one attempt in a call, the first may bring environment and waits.
    """
    if not passages:
        return set()
    values = {
        "ids": [p.claimed.attempt_id for p in passages],
        "numbers": [p.claimed.number for p in passages],
        "phases": [p.phase.value for p in passages],
        "environments": [json.dumps(dict(p.environment)) for p in passages],
        "waits": [json.dumps(dict(p.waits)) for p in passages],
        "costs": [p.cost_usd for p in passages],
    }
    with database.begin() as connection:
        return set(connection.execute(_PASS, values).scalars())


def pass_door(
    database: Database,
    claimed: Claim,
    phase: Phase,
    *,
    environment: Mapping[str, Any] | None = None,
    waits: Mapping[str, float] | None = None,
    cost_usd: float | None = None,
) -> None:
    """Record that the attempt passed a station's door now.

    Raises: StaleWriter.
    """
    if not pass_doors(database, [Passage(claimed, phase, environment or {}, waits or {}, cost_usd)]):
        raise _stale(claimed)


def record_teardown(database: Database, claimed: Claim, found: Mapping[str, Any]) -> None:
    """Record that nothing of the attempt is left. Allowed after its end: it says nothing about the outcome."""
    with database.begin() as connection:
        connection.execute(
            text(
                "UPDATE attempts SET phases = phases || jsonb_build_object('torn_down', clock_timestamp()),"
                " environment = environment || CAST(:found AS jsonb) WHERE id = :id"
            ),
            {"id": claimed.attempt_id, "found": json.dumps(dict(found))},
        )
        events.append(
            connection,
            events.Fact(
                "attempt.torn_down",
                claimed.run_id,
                claimed.task_id,
                claimed.attempt_id,
                claimed.instance_id,
                dict(found),
            ),
        )


def _stale(claimed: Claim) -> StaleWriter:
    return StaleWriter(f"attempt {claimed.number} of task {claimed.task_id} is no longer the current one")


# --- Ends -----------------------------------------------------------------------------------------------------------

_FINISH = text("""
WITH ending AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:numbers AS int[]), CAST(:reasons AS text[]),
        CAST(:verdicts AS jsonb[])) AS e(id, number, reason, verdict)
), mine AS MATERIALIZED (
    SELECT a.id FROM attempts a JOIN ending e ON e.id = a.id AND e.number = a.number
    WHERE a.state = 'running' ORDER BY a.id FOR UPDATE OF a
), done AS (
    UPDATE attempts a SET state = 'finished', finished_at = clock_timestamp(), end_reason = e.reason,
        verdict = e.verdict
    FROM ending e JOIN mine ON mine.id = e.id WHERE a.id = e.id
    RETURNING a.id, a.task_id, a.instance_id, e.reason, e.verdict
), freed AS (
    DELETE FROM leases WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), left_line AS (
    DELETE FROM holds WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), ended AS (
    UPDATE tasks t SET state = 'succeeded', finished_at = clock_timestamp(), end_reason = done.reason,
        verdict = done.verdict, failure = NULL
    FROM done WHERE t.id = done.task_id RETURNING t.id, t.run_id
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id, data)
    SELECT 'attempt.finished', ended.run_id, ended.id, done.id, done.instance_id,
        jsonb_build_object('end_reason', done.reason, 'reward', done.verdict->'reward')
    FROM done JOIN ended ON ended.id = done.task_id
)
SELECT done.id, pg_notify(:channel, ended.id::text) FROM done JOIN ended ON ended.id = done.task_id
""")


def finish_many(database: Database, endings: Sequence[Finished]) -> set[UUID]:
    """Record graded attempts: their tasks have succeeded, whatever the reward. The attempts that were recorded."""
    if not endings:
        return set()
    values = {
        "ids": [e.claimed.attempt_id for e in endings],
        "numbers": [e.claimed.number for e in endings],
        "reasons": [e.end_reason.value for e in endings],
        "verdicts": [e.verdict.model_dump_json() for e in endings],
        "channel": OUTCOME,
    }
    with database.begin() as connection:
        done = {row.id for row in connection.execute(_FINISH, values)}
        _store_artifacts(connection, [(e.claimed.attempt_id, a) for e in endings for a in e.artifacts], done)
        if done:
            events.wake_dispatcher(connection)
    return done


def finish(
    database: Database, claimed: Claim, *, end_reason: EndReason, verdict: Verdict, artifacts: Sequence[Artifact]
) -> None:
    """Record a graded attempt: the task has succeeded, whatever the reward.

    Raises: StaleWriter: nothing was written.
    """
    if not finish_many(database, [Finished(claimed, end_reason, verdict, artifacts)]):
        raise _stale(claimed)


# What follows is decided on the locked row of the task, so that a cancel that comes at the same time is not missed.
# When an instance died with several on board (`company`), nobody knows which of them killed it: none is blamed, and
# each goes on in an instance of its own, where the next loss is its own. That happens to a task once.
_END_UNMEASURED = text("""
WITH ending AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:numbers AS int[]), CAST(:states AS text[]),
        CAST(:reasons AS text[]), CAST(:blames AS text[]), CAST(:failures AS jsonb[]), CAST(:permanents AS bool[]),
        CAST(:companies AS bool[])) AS e(id, number, state, reason, blame, failure, permanent, company)
), mine AS MATERIALIZED (
    SELECT a.id FROM attempts a JOIN ending e ON e.id = a.id AND (e.number IS NULL OR e.number = a.number)
    WHERE a.state = 'running' ORDER BY a.id FOR UPDATE OF a
), done AS (
    UPDATE attempts a SET state = e.state, finished_at = clock_timestamp(), end_reason = e.reason,
        failure = e.failure
    FROM ending e JOIN mine ON mine.id = e.id WHERE a.id = e.id
    RETURNING a.id, a.number, a.task_id, a.instance_id, e.state, e.reason, e.blame, e.failure, e.permanent,
        e.company
), freed AS (
    DELETE FROM leases WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), left_line AS (
    DELETE FROM holds WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), locked AS MATERIALIZED (
    SELECT t.id, t.run_id, t.faults, t.max_attempts, t.cancel_requested_at, t.cancel_reason, t.requested_mode,
        t.resource_class
    FROM tasks t WHERE t.id IN (SELECT task_id FROM done) ORDER BY t.id FOR UPDATE
), judged AS (
    SELECT l.*, d.id AS attempt_id, d.number, d.instance_id, d.state, d.reason, d.failure, d.blame, d.permanent,
        d.company AND l.requested_mode <> 'ephemeral' AND EXISTS (
            SELECT 1 FROM resource_classes c WHERE c.name = l.resource_class AND (c.ephemeral_capacity > 0
                OR (c.name = 'standard' AND c.ephemeral_capacity IS NULL))) AS apart
    FROM locked l JOIN done d ON d.task_id = l.id
), counted AS (
    SELECT j.*, j.faults + (j.blame = 'infrastructure' AND NOT j.apart)::int AS now_faults FROM judged j
), decided AS (
    SELECT c.*,
        CASE WHEN c.cancel_requested_at IS NOT NULL THEN coalesce(c.cancel_reason, 'cancelled')
             WHEN c.blame = 'person' THEN c.reason END AS stopped,
        c.permanent OR c.blame = 'result' OR c.now_faults >= c.max_attempts AS over,
        CASE WHEN c.blame = 'interruption' AND c.now_faults = 0 THEN 0 ELSE
            least(:cap, :base * 2 ^ least(30, greatest(1, c.now_faults) - 1)) * (0.5 + random() / 2) END AS wait_s
    FROM counted c
), moved AS (
    UPDATE tasks t SET faults = d.now_faults,
        requested_mode = CASE WHEN d.apart THEN 'ephemeral' ELSE t.requested_mode END,
        state = CASE WHEN d.stopped IS NOT NULL THEN 'cancelled' WHEN d.over THEN 'failed' ELSE 'pending' END,
        end_reason = CASE WHEN d.stopped IS NOT NULL THEN d.stopped WHEN d.over THEN d.reason END,
        failure = CASE WHEN d.stopped IS NOT NULL OR d.over THEN d.failure END,
        finished_at = CASE WHEN d.stopped IS NOT NULL OR d.over THEN clock_timestamp() END,
        in_line = false, available_at = clock_timestamp() + make_interval(secs => d.wait_s)
    FROM decided d WHERE t.id = d.id RETURNING t.id, t.state
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id, data)
    SELECT 'attempt.' || d.state, d.run_id, d.id, d.attempt_id, d.instance_id,
        d.failure || jsonb_build_object('end_reason', d.reason) || CASE WHEN m.state = 'pending'
            THEN jsonb_build_object('retry_in_s', d.wait_s, 'apart', d.apart)
            ELSE jsonb_build_object('task', m.state) END
    FROM decided d JOIN moved m ON m.id = d.id
)
SELECT d.attempt_id, CASE WHEN m.state <> 'pending' THEN pg_notify(:channel, d.id::text) END
FROM decided d JOIN moved m ON m.id = d.id
""")


def fail_many(database: Database, endings: Sequence[Failed], retry: RetryPolicy) -> set[UUID]:
    """Record attempts that were not measured; each task waits for its next, or ends when there is none."""
    if not endings:
        return set()
    with database.begin() as connection:
        done = _end_unmeasured(
            connection,
            retry,
            ids=[e.claimed.attempt_id for e in endings],
            numbers=[e.claimed.number for e in endings],
            states=[_STATE_OF.get(BLAME[e.end_reason], "error") for e in endings],
            reasons=[e.end_reason for e in endings],
            failures=[e.failure for e in endings],
            permanents=[e.permanent for e in endings],
            companies=[False] * len(endings),
        )
        _store_artifacts(connection, [(e.claimed.attempt_id, a) for e in endings for a in e.artifacts], done)
    return done


_STATE_OF = {Blame.PERSON: "cancelled", Blame.INTERRUPTION: "interrupted"}
"""What an attempt is called that ended so by itself; one that was taken away is lost, or interrupted."""


def fail(
    database: Database,
    claimed: Claim,
    *,
    end_reason: EndReason,
    failure: Failure,
    artifacts: Sequence[Artifact],
    permanent: bool,
    retry: RetryPolicy,
) -> None:
    """Record an attempt that was not measured; the task waits for its next one, or ends when there is none.

    Raises: StaleWriter: nothing was written.
    """
    if not fail_many(database, [Failed(claimed, end_reason, failure, artifacts, permanent)], retry):
        raise _stale(claimed)


def lose(
    connection: Connection,
    attempt_ids: Sequence[UUID],
    failure: Failure,
    end_reason: EndReason,
    retry: RetryPolicy,
    *,
    company: bool = False,
) -> list[UUID]:
    """Take running attempts away from whoever had them, within the caller's transaction; returns those taken.

    company: they ended together, and at most one of them is the reason.
    """
    count = len(attempt_ids)
    if not count:
        return []
    state = "interrupted" if BLAME[end_reason] is Blame.INTERRUPTION else "lost"
    taken = _end_unmeasured(
        connection,
        retry,
        ids=list(attempt_ids),
        numbers=[None] * count,
        states=[state] * count,
        reasons=[end_reason] * count,
        failures=[failure] * count,
        permanents=[False] * count,
        companies=[company] * count,
    )
    return [attempt_id for attempt_id in attempt_ids if attempt_id in taken]


def _end_unmeasured(
    connection: Connection,
    retry: RetryPolicy,
    *,
    ids: Sequence[UUID],
    numbers: Sequence[int | None],
    states: Sequence[str],
    reasons: Sequence[EndReason],
    failures: Sequence[Failure],
    permanents: Sequence[bool],
    companies: Sequence[bool],
) -> set[UUID]:
    rows = connection.execute(
        _END_UNMEASURED,
        {
            "ids": list(ids),
            "numbers": list(numbers),
            "states": list(states),
            "reasons": [reason.value for reason in reasons],
            "blames": [BLAME[reason].value for reason in reasons],
            "failures": [failure.model_dump_json() for failure in failures],
            "permanents": list(permanents),
            "companies": list(companies),
            "base": retry.base_s,
            "cap": retry.cap_s,
            "channel": OUTCOME,
        },
    )
    done = {row.attempt_id for row in rows}
    if done:
        events.wake_dispatcher(connection)
    return done


def _store_artifacts(connection: Connection, artifacts: Sequence[tuple[UUID, Artifact]], of: set[UUID]) -> None:
    rows = [{"attempt_id": i, **artifact.model_dump(mode="json")} for i, artifact in artifacts if i in of]
    if rows:
        connection.execute(
            text(
                "INSERT INTO artifacts (attempt_id, kind, key, url, size_bytes, sha256, missing)"
                " VALUES (:attempt_id, :kind, :key, :url, :size_bytes, :sha256, :missing)"
            ),
            rows,
        )
