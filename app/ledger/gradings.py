"""Queues, publishes and claims gradings of attempts whose agent has ended; a lost grader's grading is put back.

A writer of a grading carries the grading's number (`Claim.grading`), as every writer carries the attempt's. Locks are
acquired as in `app.ledger.attempts`: instance, attempt, task; every writer of a grading locks its attempt first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text
from uuid_utils import compat as uuids

from app.ledger import attempts, ends, events
from app.ledger.admission import QueuedMessage
from app.ledger.attempts import Claim
from app.ledger.database import Database, sql
from app.models.endings import EndReason, RetryPolicy
from app.models.instance import InstanceMode
from app.models.outcome import AgentResult, Artifact, Failure, WakeUpMessage

MOST_FAULTS = 3
"""Number of lost graders and failed gradings after which the attempt ends as not scored."""


@dataclass(frozen=True, slots=True)
class GradingClaim:
    """The right to grade one attempt; its agent's result; the environment and waits that are recorded so far."""

    claimed: Claim
    result: AgentResult
    environment: Mapping[str, Any]
    waits: Mapping[str, float]
    scripted: bool


_HAND_OVER = text("""
WITH mine AS MATERIALIZED (
    SELECT id FROM attempts WHERE id = :id AND number = :number AND state = 'running' FOR UPDATE
), moved AS (
    UPDATE attempts a SET state = 'grading', gradings = 1, deadline_at = NULL, waits = a.waits || CAST(:waits AS jsonb),
        environment = a.environment || jsonb_build_object('submission', CAST(:result AS jsonb)),
        phases = a.phases || jsonb_build_object('grading_queued', clock_timestamp())
    FROM mine WHERE a.id = mine.id RETURNING a.id, a.number, a.task_id, a.instance_id, a.resource_class
), freed AS (
    DELETE FROM leases WHERE attempt_id IN (SELECT id FROM moved)
), freed_semaphores AS (
    DELETE FROM semaphore_holders WHERE attempt_id IN (SELECT id FROM moved)
), queued AS (
    INSERT INTO gradings (attempt_id, number, resource_class, submission)
    SELECT id, number, resource_class, CAST(:result AS jsonb) FROM moved
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id)
    SELECT 'attempt.grading_queued', t.run_id, t.id, m.id, m.instance_id FROM moved m JOIN tasks t ON t.id = m.task_id
)
SELECT id FROM moved
""")


def hand_over(
    database: Database,
    claimed: Claim,
    result: AgentResult,
    *,
    artifacts: Sequence[Artifact] = (),
    waits: Mapping[str, float] | None = None,
) -> None:
    """Frees the slot of an attempt whose agent ended; queues its grading. Raises: StaleWriter: nothing was written."""
    values = {
        "id": claimed.attempt_id,
        "number": claimed.number,
        "result": result.model_dump_json(),
        "waits": json.dumps(dict(waits or {})),
    }
    with database.begin() as connection:
        if connection.execute(_HAND_OVER, values).first() is None:
            raise attempts.stale(claimed)
        ends.store_artifacts(connection, [(claimed.attempt_id, one) for one in artifacts], {claimed.attempt_id})
        events.wake_dispatcher(connection)


_FAILED = text("""
SELECT t.id FROM tasks t JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
WHERE a.id = ANY(CAST(:ids AS uuid[])) AND t.state = 'failed' AND jsonb_exists(a.environment, 'submission')
ORDER BY t.id FOR UPDATE OF t
""")
# Sets the faults so that the next one ends the task: the agent must not run again.
_MOVES = (
    "has_dependents = EXISTS (SELECT FROM task_dependencies d WHERE d.on_task = tasks.id),"
    " state = 'pending', faults = max_attempts - 1, in_line = false, finished_at = NULL, end_reason = NULL,"
    " failure = NULL, deadline_at = CASE WHEN deadline_at > clock_timestamp() THEN deadline_at END",
    "state = 'admitted', attempts = attempts + 1",
    "state = 'running'",
)
# The environment's facts are copied from the earlier attempt, to which the environment belongs.
_QUEUE_AGAIN = text("""
WITH new AS (
    INSERT INTO attempts (id, task_id, number, state, user_name, mode, resource_class, instance_id, claimed_at, phases,
        environment, scripted, graded_apart, gradings)
    SELECT n.id, a.task_id, t.attempts, 'grading', a.user_name, a.mode, a.resource_class, a.instance_id,
        clock_timestamp(), a.phases - ARRAY['image_ready', 'grading_started', 'graded', 'stored', 'torn_down']
            || jsonb_build_object('grading_queued', clock_timestamp()),
        a.environment - ARRAY['graded_on', 'phases', 'teardown'], a.scripted, a.graded_apart, 1
    FROM unnest(CAST(:tasks AS uuid[]), CAST(:new AS uuid[])) AS n(task_id, id) JOIN tasks t ON t.id = n.task_id
    JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts - 1
    RETURNING id, task_id, number, instance_id, resource_class, environment
), queued AS (
    INSERT INTO gradings (attempt_id, number, resource_class, submission)
    SELECT id, number, resource_class, environment->'submission' FROM new
), kept AS (
    INSERT INTO artifacts (attempt_id, kind, key, url, size_bytes, sha256)
    SELECT new.id, f.kind, f.key, f.url, f.size_bytes, f.sha256 FROM new
    JOIN attempts a ON a.task_id = new.task_id AND a.number = new.number - 1 JOIN artifacts f ON f.attempt_id = a.id
)
INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id)
SELECT 'attempt.grading_queued', t.run_id, t.id, new.id, new.instance_id FROM new JOIN tasks t ON t.id = new.task_id
RETURNING task_id
""")


def queue_again(database: Database, attempt_ids: Sequence[UUID]) -> set[UUID]:
    """Queues what the last attempts of failed tasks left for another grading, each as a new attempt without an agent.

    Returns these tasks. Skips a task if nothing was left to a grader, or if the task has continued since.
    """
    with database.begin() as connection:
        task_ids = list(connection.execute(_FAILED, {"ids": list(attempt_ids)}).scalars())
        for move in _MOVES if task_ids else ():
            sql(connection, f"UPDATE tasks SET {move} WHERE id = ANY(:ids)", {"ids": task_ids})  # noqa: S608 (no input)
        values = {"tasks": task_ids, "new": [uuids.uuid7() for _ in task_ids]}
        queued = set(connection.execute(_QUEUE_AGAIN, values).scalars()) if task_ids else set()
        events.wake_dispatcher(connection)
    return queued


# At most twice as many gradings as graders have slots are published or claimed: a grader finds its next one in the
# broker, which stays nearly empty, however many wait. The user with the fewest such gradings comes next.
_DUE = text("""
WITH room AS MATERIALIZED (
    SELECT i.resource_class, 2 * sum(i.slots) - (SELECT count(*) FROM gradings g
        WHERE g.resource_class = i.resource_class AND (g.instance_id IS NOT NULL
            OR g.published_at >= clock_timestamp() - make_interval(secs => CAST(:age AS float8)))) AS free
    FROM instances i WHERE i.mode = 'grading' AND i.state NOT IN ('draining', 'terminated', 'failed') GROUP BY 1
), in_hand AS MATERIALIZED (
    SELECT g.resource_class, a.user_name, count(*) AS held FROM gradings g JOIN attempts a ON a.id = g.attempt_id
    WHERE g.instance_id IS NOT NULL
        OR g.published_at >= clock_timestamp() - make_interval(secs => CAST(:age AS float8)) GROUP BY 1, 2
)
SELECT g.attempt_id, g.number, g.resource_class, t.name, t.agent, r.name AS run_name
FROM room CROSS JOIN LATERAL (
    SELECT o.* FROM (
        SELECT * FROM gradings WHERE resource_class = room.resource_class AND instance_id IS NULL
            AND available_at <= clock_timestamp() AND (published_at IS NULL
                OR published_at < clock_timestamp() - make_interval(secs => CAST(:age AS float8)))
        ORDER BY available_at LIMIT CASE WHEN room.free > 0 THEN 1000 ELSE 0 END
    ) o JOIN attempts a ON a.id = o.attempt_id
    LEFT JOIN in_hand h ON h.resource_class = o.resource_class AND h.user_name = a.user_name
    ORDER BY coalesce(h.held, 0) + row_number() OVER (PARTITION BY a.user_name ORDER BY o.available_at), o.available_at
    LIMIT greatest(0, room.free)
) g JOIN attempts a ON a.id = g.attempt_id JOIN tasks t ON t.id = a.task_id LEFT JOIN runs r ON r.id = t.run_id
""")


def unpublished(connection: Connection, older_than_s: float) -> list[QueuedMessage]:
    """Returns gradings not published within `older_than_s` seconds, at most as many as graders will soon take."""
    rows = connection.execute(_DUE, {"age": older_than_s})
    return [
        QueuedMessage(
            WakeUpMessage(attempt_id=row.attempt_id, number=row.number),
            InstanceMode.GRADING,
            row.resource_class,
            about=f"run={row.run_name or '-'} task={row.name} agent={row.agent}",
        )
        for row in rows
    ]


def mark_published(connection: Connection, attempt_ids: Sequence[UUID]) -> None:
    """Records that the broker has the messages of these gradings; skips gradings that are claimed or being claimed."""
    sql(
        connection,
        "UPDATE gradings SET published_at = clock_timestamp() WHERE attempt_id IN (SELECT attempt_id FROM gradings"
        " WHERE attempt_id = ANY(:ids) AND instance_id IS NULL FOR UPDATE SKIP LOCKED)",
        {"ids": list(attempt_ids)},
    )


def give_back(database: Database, message: WakeUpMessage) -> None:
    """Gives back the message of a grader that takes nothing new: the dispatcher sends it again at once."""
    with database.begin() as connection:
        sql(
            connection,
            "UPDATE gradings SET published_at = NULL WHERE attempt_id = :id AND instance_id IS NULL",
            {"id": message.attempt_id},
        )
        events.wake_dispatcher(connection)


# An instance that repeats its claim gets the same grading again: the first answer may have been lost.
_CLAIM = text("""
WITH free AS MATERIALIZED (
    SELECT id, resource_class FROM instances WHERE id = :instance AND mode = 'grading' AND state = 'ready' FOR UPDATE
), open AS MATERIALIZED (
    SELECT a.id FROM attempts a JOIN free ON free.resource_class = a.resource_class
    WHERE a.id = :id AND a.number = :number AND a.state = 'grading' FOR UPDATE OF a
), given AS (
    UPDATE gradings g SET instance_id = free.id, started_at = clock_timestamp()
    FROM open, free, attempts a, tasks t
    WHERE g.attempt_id = open.id AND a.id = open.id AND t.id = a.task_id AND t.cancel_requested_at IS NULL
        AND (g.instance_id IS NULL AND g.available_at <= clock_timestamp() OR g.instance_id = free.id)
    RETURNING g.attempt_id, g.instance_id, g.submission, t.run_id, t.spec_digest, t.lifetime_s
), moved AS (
    UPDATE attempts a SET gradings = a.gradings + 1,
        deadline_at = clock_timestamp() + make_interval(secs => given.lifetime_s),
        phases = a.phases || jsonb_build_object('grading_started', clock_timestamp()),
        environment = a.environment || jsonb_build_object('graded_on', given.instance_id)
    FROM given WHERE a.id = given.attempt_id
    RETURNING a.id, a.number, a.task_id, a.mode, a.deadline_at, given.instance_id, given.run_id, given.spec_digest,
        a.gradings AS grading, given.submission, a.environment, a.waits, a.scripted
), leased AS (
    INSERT INTO leases (attempt_id, instance_id, expires_at)
    SELECT id, instance_id, clock_timestamp() + make_interval(secs => :lease) FROM moved
    ON CONFLICT (attempt_id) DO UPDATE SET expires_at = excluded.expires_at
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id)
    SELECT 'attempt.grading_started', run_id, task_id, id, instance_id FROM moved
)
SELECT * FROM moved
""")


def claim(database: Database, message: WakeUpMessage, instance_id: UUID, *, lease_s: float) -> GradingClaim | None:
    """Claims a grading for a grader, with a lease; None: nothing to claim (a stale or duplicate message).

    An instance may repeat it until it works on the grading. Raises: DatabaseUnavailable: the claim may be committed.
    """
    values = {"id": message.attempt_id, "number": message.number, "instance": instance_id, "lease": lease_s}
    with database.begin() as connection:
        row = connection.execute(_CLAIM, values).first()
        if row is None:
            return None
        (claimed,) = attempts.claims_of(connection, [row])
    result = AgentResult.model_validate(row.submission)
    return GradingClaim(claimed, result, row.environment, row.waits, row.scripted)


_LOCK = text(
    "SELECT id, gradings FROM attempts WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'grading'"
    " ORDER BY id FOR UPDATE"
)
_PUT_BACK = text("""
WITH held AS (
    SELECT g.attempt_id, a.task_id, t.run_id, g.instance_id, g.faults + CAST(:fault AS int) AS faults,
        t.cancel_requested_at IS NOT NULL OR g.faults + CAST(:fault AS int) >= :most AS over
    FROM gradings g JOIN attempts a ON a.id = g.attempt_id JOIN tasks t ON t.id = a.task_id
    WHERE g.attempt_id = ANY(CAST(:ids AS uuid[])) AND g.instance_id IS NOT NULL
), back AS (
    UPDATE gradings g SET instance_id = NULL, started_at = NULL, published_at = NULL, faults = h.faults,
        failure = coalesce(CAST(:failure AS jsonb), g.failure),
        available_at = clock_timestamp() + make_interval(secs => CASE WHEN :fault = 0 THEN 0
            ELSE least(:cap, :base * 2 ^ (h.faults - 1)) * (0.5 + random() / 2) END)
    FROM held h WHERE g.attempt_id = h.attempt_id AND NOT h.over RETURNING g.attempt_id
), waits AS (
    UPDATE attempts a SET deadline_at = NULL, phases = a.phases - 'grading_started' FROM back
    WHERE a.id = back.attempt_id
), freed AS (
    DELETE FROM leases WHERE attempt_id IN (SELECT attempt_id FROM back)
), freed_semaphores AS (
    DELETE FROM semaphore_holders WHERE attempt_id IN (SELECT attempt_id FROM back)
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id, data)
    SELECT 'attempt.grading_put_back', run_id, task_id, attempt_id, instance_id,
        coalesce(CAST(:failure AS jsonb), '{}') || jsonb_build_object('faults', faults) FROM held WHERE NOT over
)
SELECT attempt_id, over FROM held
""")


def put_back(database: Database, claimed: Claim, failure: Failure | None, retry: RetryPolicy) -> bool:
    """Queues a grading for another grader. False, and nothing was written: too many faults, or its task is cancelled.

    failure: why it failed; None: its grader had to stop, which is no fault. Raises: StaleWriter.
    """
    with database.begin() as connection:
        if numbers(connection, [claimed.attempt_id]).get(claimed.attempt_id) != claimed.grading:
            raise attempts.stale(claimed)
        return not any(_put_back(connection, [claimed.attempt_id], failure, retry).values())


def lose(
    connection: Connection, attempt_ids: Sequence[UUID], failure: Failure | None, retry: RetryPolicy
) -> list[UUID]:
    """Takes gradings away from their graders, within the caller's transaction; returns the attempts that ended with it.

    failure: as in `put_back`. An attempt ends if its grading was lost too often or its task is cancelled.
    """
    if not attempt_ids:
        return []
    locked = numbers(connection, attempt_ids)
    over = [one for one, ends_now in _put_back(connection, list(locked), failure, retry).items() if ends_now]
    why = failure or Failure(error="InstanceFailed", message="its grader was told to stop")
    events.wake_dispatcher(connection)
    return ends.lose(connection, over, why, EndReason.INFRASTRUCTURE, retry, gradings=locked)


def take_away(
    connection: Connection, attempt_ids: Sequence[UUID], failure: Failure, end_reason: EndReason, retry: RetryPolicy
) -> list[UUID]:
    """Takes attempts from workers and gradings from graders; returns the attempts that ended with it."""
    ended = lose(connection, attempt_ids, failure, retry)
    return ended + ends.lose(connection, [one for one in attempt_ids if one not in ended], failure, end_reason, retry)


def numbers(connection: Connection, attempt_ids: Sequence[UUID]) -> dict[UUID, int]:
    """Locks those attempts that are in grading until the transaction ends; returns their gradings' claim numbers."""
    return {row.id: row.gradings for row in connection.execute(_LOCK, {"ids": list(attempt_ids)})}


def _put_back(
    connection: Connection, attempt_ids: Sequence[UUID], failure: Failure | None, retry: RetryPolicy
) -> dict[UUID, bool]:
    """Puts locked, claimed gradings back. Returns for each whether it must end instead; such a grading is unchanged."""
    values = {
        "ids": list(attempt_ids),
        "fault": int(failure is not None),
        "failure": failure.model_dump_json() if failure else None,
        "most": MOST_FAULTS,
        "base": retry.base_s,
        "cap": retry.cap_s,
    }
    rows = connection.execute(_PUT_BACK, values).all()
    if rows:
        events.wake_dispatcher(connection)
    return {row.attempt_id: row.over for row in rows}
