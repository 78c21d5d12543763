"""Ends attempts (graded, not scored, or lost) and decides whether the task ends or is retried.

Like every write, an end is conditional on the attempt's number and state: see `app.ledger.attempts`. Locks are acquired
in its order: attempt, then task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.dialects.postgresql import insert

from app.ledger import events
from app.ledger.attempts import Claim, stale
from app.ledger.database import Database, sql
from app.ledger.events import OUTCOME
from app.models.endings import BLAME, Blame, EndReason, RetryPolicy
from app.models.outcome import Artifact, Failure, Verdict
from app.models.service_tables import ArtifactRow


@dataclass(frozen=True, slots=True)
class Finished:
    """A graded attempt."""

    claimed: Claim
    end_reason: EndReason
    verdict: Verdict
    artifacts: Sequence[Artifact] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that was not scored. `permanent`: a retry would fail the same way; `waits`: as in `PhaseRecord`."""

    claimed: Claim
    end_reason: EndReason
    failure: Failure
    artifacts: Sequence[Artifact] = ()
    permanent: bool = False
    waits: Mapping[str, float] = field(default_factory=dict)


_FINISH = text("""
WITH ending AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:numbers AS int[]), CAST(:reasons AS text[]),
        CAST(:verdicts AS jsonb[]), CAST(:gradings AS int[])) AS e(id, number, reason, verdict, grading)
), mine AS MATERIALIZED (
    SELECT a.id, a.task_id FROM attempts a JOIN ending e ON e.id = a.id AND e.number = a.number
    WHERE a.state = CASE e.grading WHEN 0 THEN 'running' ELSE 'grading' END AND a.gradings = e.grading
    ORDER BY a.id FOR UPDATE OF a
), locked AS MATERIALIZED (
    SELECT t.id, t.cancel_reason IS NOT DISTINCT FROM 'superseded' AS late FROM tasks t
    WHERE t.id IN (SELECT task_id FROM mine) ORDER BY t.id FOR UPDATE
), done AS (
    UPDATE attempts a SET state = CASE WHEN l.late THEN 'cancelled' ELSE 'finished' END,
        finished_at = clock_timestamp(), end_reason = CASE WHEN l.late THEN 'superseded' ELSE e.reason END,
        verdict = CASE WHEN NOT l.late THEN e.verdict END
    FROM ending e JOIN mine ON mine.id = e.id JOIN locked l ON l.id = mine.task_id WHERE a.id = e.id
    RETURNING a.id, a.task_id, a.instance_id, a.state, a.end_reason AS reason, a.verdict, a.scripted
), freed AS (
    DELETE FROM leases WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), graded AS (
    DELETE FROM gradings WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), freed_semaphores AS (
    DELETE FROM semaphore_holders WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), ended AS (
    UPDATE tasks t SET state = CASE done.state WHEN 'finished' THEN 'succeeded' ELSE 'cancelled' END,
        finished_at = clock_timestamp(), end_reason = done.reason, verdict = done.verdict, failure = NULL,
        scripted = done.scripted
    FROM done WHERE t.id = done.task_id RETURNING t.id, t.run_id
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id, data)
    SELECT 'attempt.' || done.state, ended.run_id, ended.id, done.id, done.instance_id,
        jsonb_build_object('end_reason', done.reason, 'reward', done.verdict->'reward')
            || CASE WHEN done.scripted THEN jsonb_build_object('scripted', true) ELSE '{}' END
    FROM done JOIN ended ON ended.id = done.task_id
)
SELECT done.id, pg_notify(:channel, ended.id::text) FROM done JOIN ended ON ended.id = done.task_id
""")


def finish_many(database: Database, endings: Sequence[Finished]) -> set[UUID]:
    """Records graded attempts; their tasks succeed, whatever the reward. Returns the attempts that were recorded.

    An attempt whose task was superseded meanwhile ends as superseded, without its verdict.
    """
    if not endings:
        return set()
    values = {
        "ids": [e.claimed.attempt_id for e in endings],
        "numbers": [e.claimed.number for e in endings],
        "reasons": [e.end_reason.value for e in endings],
        "verdicts": [e.verdict.model_dump_json() for e in endings],
        "gradings": [e.claimed.grading for e in endings],
        "channel": OUTCOME,
    }
    with database.begin() as connection:
        ended = {row.id for row in connection.execute(_FINISH, values)}
        store_artifacts(connection, [(e.claimed.attempt_id, a) for e in endings for a in e.artifacts], ended)
        if ended:
            events.wake_dispatcher(connection)
    return ended


def finish(
    database: Database,
    claimed: Claim,
    *,
    verdict: Verdict,
    end_reason: EndReason = EndReason.SUBMITTED,
    artifacts: Sequence[Artifact] = (),
) -> None:
    """Records a graded attempt: as `finish_many`. Raises: StaleWriter: nothing was written."""
    if not finish_many(database, [Finished(claimed, end_reason, verdict, artifacts)]):
        raise stale(claimed)


# The decision is made on the task's locked row, so that a concurrent cancel is not missed.
# When an instance died with several attempts on it (`company`), the cause is unknown: none gets a fault, and each task
# is retried in an ephemeral instance of its own (if its user may have one), where the next loss counts as its fault.
# This happens at most once per task.
_END_NOT_SCORED = text("""
WITH ending AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:numbers AS int[]), CAST(:states AS text[]),
        CAST(:reasons AS text[]), CAST(:blames AS text[]), CAST(:failures AS jsonb[]), CAST(:permanents AS bool[]),
        CAST(:companies AS bool[]), CAST(:waits AS jsonb[]), CAST(:gradings AS int[]))
        AS e(id, number, state, reason, blame, failure, permanent, company, waits, grading)
), mine AS MATERIALIZED (
    SELECT a.id FROM attempts a JOIN ending e ON e.id = a.id AND (e.number IS NULL OR e.number = a.number)
    WHERE a.state = CASE e.grading WHEN 0 THEN 'running' ELSE 'grading' END AND a.gradings = e.grading
    ORDER BY a.id FOR UPDATE OF a
), done AS (
    UPDATE attempts a SET state = e.state, finished_at = clock_timestamp(), end_reason = e.reason,
        failure = e.failure, waits = a.waits || e.waits
    FROM ending e JOIN mine ON mine.id = e.id WHERE a.id = e.id
    RETURNING a.id, a.number, a.task_id, a.instance_id, e.state, e.reason, e.blame, e.failure, e.permanent,
        e.company
), freed AS (
    DELETE FROM leases WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), graded AS (
    DELETE FROM gradings WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), freed_semaphores AS (
    DELETE FROM semaphore_holders WHERE attempt_id = ANY(CAST(:ids AS uuid[])) AND attempt_id IN (SELECT id FROM done)
), locked AS MATERIALIZED (
    SELECT t.id, t.run_id, t.faults, t.max_attempts, t.cancel_requested_at, t.cancel_reason, t.requested_mode,
        t.resource_class, t.user_name
    FROM tasks t WHERE t.id IN (SELECT task_id FROM done) ORDER BY t.id FOR UPDATE
), judged AS (
    SELECT l.*, d.id AS attempt_id, d.number, d.instance_id, d.state, d.reason, d.failure, d.blame, d.permanent,
        d.company AND l.requested_mode <> 'ephemeral' AND EXISTS (
            SELECT 1 FROM resource_classes c WHERE c.name = l.resource_class AND (c.ephemeral_capacity > 0
                OR (c.name = 'standard' AND c.ephemeral_capacity IS NULL)))
            AND coalesce((SELECT q.instances FROM quotas q WHERE q.user_name IN (l.user_name, '*')
                ORDER BY q.user_name = '*' LIMIT 1), 1) > 0 AS apart
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


class _Ending(NamedTuple):
    """A row of `_END_NOT_SCORED`. `number` None: matches any attempt number; `grading`: as in `Claim`."""

    id: UUID
    number: int | None
    state: str
    reason: EndReason
    failure: Failure
    permanent: bool = False
    company: bool = False
    waits: Mapping[str, float] = {}
    grading: int = 0


def fail_many(database: Database, endings: Sequence[Failed], retry: RetryPolicy) -> set[UUID]:
    """Records attempts that were not scored; each task waits for its next attempt, or ends if no retry is left."""
    if not endings:
        return set()
    rows = [
        _Ending(
            e.claimed.attempt_id,
            e.claimed.number,
            _STATE_OF.get(BLAME[e.end_reason], "error"),
            e.end_reason,
            e.failure,
            permanent=e.permanent,
            waits=e.waits,
            grading=e.claimed.grading,
        )
        for e in endings
    ]
    with database.begin() as connection:
        ended = _end_not_scored(connection, retry, rows)
        store_artifacts(connection, [(e.claimed.attempt_id, a) for e in endings for a in e.artifacts], ended)
    return ended


_STATE_OF = {Blame.PERSON: "cancelled", Blame.INTERRUPTION: "interrupted"}
"""State of an attempt that its own worker ended; one taken away from its worker is lost or interrupted."""


def fail(
    database: Database,
    claimed: Claim,
    *,
    end_reason: EndReason,
    failure: Failure,
    retry: RetryPolicy,
    artifacts: Sequence[Artifact] = (),
    permanent: bool = False,
    waits: Mapping[str, float] | None = None,
) -> None:
    """Records an attempt that was not scored: as `fail_many`. Raises: StaleWriter: nothing was written."""
    if not fail_many(database, [Failed(claimed, end_reason, failure, artifacts, permanent, waits or {})], retry):
        raise stale(claimed)


def lose(
    connection: Connection,
    attempt_ids: Sequence[UUID],
    failure: Failure,
    end_reason: EndReason,
    retry: RetryPolicy,
    *,
    company: bool = False,
    gradings: Mapping[UUID, int] | None = None,
) -> list[UUID]:
    """Takes running attempts away from their workers, within the caller's transaction; returns the ended attempts.

    company: they ended together, and at most one of them is the cause. gradings: claim numbers of attempts that are
    in grading.
    """
    state = "interrupted" if BLAME[end_reason] is Blame.INTERRUPTION else "lost"
    numbers = gradings or {}
    rows = [
        _Ending(one, None, state, end_reason, failure, company=company, grading=numbers.get(one, 0))
        for one in attempt_ids
    ]
    ended = _end_not_scored(connection, retry, rows) if rows else set()
    return [attempt_id for attempt_id in attempt_ids if attempt_id in ended]


def _end_not_scored(connection: Connection, retry: RetryPolicy, endings: Sequence[_Ending]) -> set[UUID]:
    values = {
        "ids": [e.id for e in endings],
        "numbers": [e.number for e in endings],
        "states": [e.state for e in endings],
        "reasons": [e.reason.value for e in endings],
        "blames": [BLAME[e.reason].value for e in endings],
        "failures": [e.failure.model_dump_json() for e in endings],
        "permanents": [e.permanent for e in endings],
        "companies": [e.company for e in endings],
        "waits": [json.dumps(dict(e.waits)) for e in endings],
        "gradings": [e.grading for e in endings],
    }
    options = {"base": retry.base_s, "cap": retry.cap_s, "channel": OUTCOME}
    ended = {row.attempt_id for row in connection.execute(_END_NOT_SCORED, values | options)}
    if ended:
        events.wake_dispatcher(connection)
    return ended


def store_artifacts(connection: Connection, artifacts: Sequence[tuple[UUID, Artifact]], of: set[UUID]) -> None:
    """Records artifacts of the attempts in `of`; an artifact that a grader stored again replaces the first one."""
    rows = [{"attempt_id": i, **artifact.model_dump(mode="json")} for i, artifact in artifacts if i in of]
    if rows:
        statement = insert(ArtifactRow)
        again = {name: statement.excluded[name] for name in Artifact.model_fields if name != "kind"}
        connection.execute(statement.on_conflict_do_update(index_elements=["attempt_id", "kind"], set_=again), rows)


def record_teardown(
    database: Database, claimed: Claim, found: Mapping[str, Any], samples: Mapping[str, Any] | None = None
) -> None:
    """Records that this host has released the attempt's resources. Allowed after its end: the outcome is unchanged.

    samples: memory and processors, by purpose of the environment; they are in no event.

    While it is in grading, other resources remain elsewhere: its grader's call then records the end of the teardown.
    """
    ids = (claimed.run_id, claimed.task_id, claimed.attempt_id, claimed.instance_id)
    with database.begin() as connection:
        ended = sql(
            connection,
            "UPDATE attempts SET phases = phases || CASE state WHEN 'grading' THEN '{}'"
            " ELSE jsonb_build_object('torn_down', clock_timestamp()) END,"
            " environment = environment || CAST(:found AS jsonb) || jsonb_build_object('teardown',"
            " coalesce(environment->'teardown', '{}') || coalesce(CAST(:found AS jsonb)->'teardown', '{}'))"
            " || CASE CAST(:samples AS jsonb) WHEN '{}' THEN '{}' ELSE jsonb_build_object('samples',"
            " coalesce(environment->'samples', '{}') || CAST(:samples AS jsonb)) END"
            " WHERE id = :id RETURNING state <> 'grading'",
            {"id": claimed.attempt_id, "found": json.dumps(dict(found)), "samples": json.dumps(dict(samples or {}))},
        ).scalar()
        if ended:
            events.append(connection, events.Fact("attempt.torn_down", *ids, dict(found)))


# The usual lock order: attempt, then task. An attempt whose verdict changed after it was read is left out.
_REGRADE = text("""
WITH given AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:verdicts AS jsonb[])) AS g(id, verdict)
), mine AS MATERIALIZED (
    SELECT a.id FROM attempts a JOIN given g ON g.id = a.id
    WHERE a.state = 'finished'
        AND a.verdict->>'regraded_at' IS NOT DISTINCT FROM g.verdict#>>'{previous,-1,regraded_at}'
    ORDER BY a.id FOR UPDATE OF a
), done AS (
    UPDATE attempts a SET verdict = g.verdict FROM given g JOIN mine ON mine.id = g.id WHERE a.id = g.id
    RETURNING a.id, a.task_id, a.number, a.instance_id, g.verdict
), of_tasks AS (
    UPDATE tasks t SET verdict = done.verdict FROM done
    WHERE t.id = done.task_id AND t.attempts = done.number AND t.state = 'succeeded' RETURNING t.id, t.run_id
)
INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id, data)
SELECT 'attempt.regraded', of_tasks.run_id, of_tasks.id, done.id, done.instance_id, jsonb_build_object(
    'reward', done.verdict->'reward', 'grader', done.verdict->'grader',
    'previous_reward', done.verdict#>'{previous,-1,reward}', 'previous_grader', done.verdict#>'{previous,-1,grader}')
FROM done JOIN of_tasks ON of_tasks.id = done.task_id
RETURNING attempt_id
""")


def regrade(database: Database, verdicts: Mapping[UUID, Verdict]) -> set[UUID]:
    """Replaces the attempts' verdicts; the last of `previous` is the replaced verdict. Returns the written attempts.

    Attempts that another regrade has changed are left out.
    """
    if not verdicts:
        return set()
    values = {"ids": list(verdicts), "verdicts": [one.model_dump_json() for one in verdicts.values()]}
    return {row.attempt_id for row in database.sql(_REGRADE, values)}
