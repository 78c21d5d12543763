"""The life of an attempt in the ledger: admitted, claimed, phase by phase, ended.

Every write carries the attempt's id and number and is conditional on its state; a writer that comes late gets
`StaleWriter` and must stop.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text
from uuid_utils import compat as uuids

from app.errors import StaleWriter
from app.ledger import events
from app.ledger.accept import spec_of
from app.ledger.database import Database
from app.ledger.events import Fact
from app.models.endings import BLAME, Blame, EndReason, backoff_s
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
class RetryPolicy:
    """Seconds to wait after an infrastructure fault: doubling from `base_s` to `cap_s`, with jitter."""

    base_s: float
    cap_s: float

    def wait_s(self, faults: int) -> float:
        """Somewhere between half and the whole of the backoff, so that a crowd does not come back at once."""
        return backoff_s(faults, base_s=self.base_s, cap_s=self.cap_s) * random.uniform(0.5, 1.0)


# --- Admission ------------------------------------------------------------------------------------------------------

_ADMIT = text("""
WITH chosen AS (
    SELECT * FROM unnest(CAST(:tasks AS uuid[]), CAST(:attempts AS uuid[]), CAST(:modes AS text[]))
        AS c(task_id, attempt_id, mode)
), moved AS (
    UPDATE tasks t SET state = 'admitted', attempts = t.attempts + 1, mode = c.mode
    FROM chosen c WHERE t.id = c.task_id AND t.state = 'pending' AND t.cancel_requested_at IS NULL
    RETURNING t.id AS task_id, t.run_id, t.attempts AS number, t.resource_class, t.accepted_at, c.attempt_id, c.mode
), dispatched AS (
    INSERT INTO attempts (id, task_id, number, mode, resource_class, phases)
    SELECT attempt_id, task_id, number, mode, resource_class,
           jsonb_build_object('accepted', accepted_at, 'admitted', clock_timestamp())
    FROM moved
), facts AS (
    INSERT INTO events (kind, run_id, task_id, attempt_id, data)
    SELECT 'attempt.admitted', run_id, task_id, attempt_id, jsonb_build_object('number', number, 'mode', mode)
    FROM moved
)
SELECT attempt_id, number, mode, resource_class FROM moved
""")


@dataclass(frozen=True, slots=True)
class Published:
    """A hint together with the queue that it goes to."""

    hint: Hint
    mode: Mode
    resource_class: str


def admit(connection: Connection, choices: Iterable[tuple[UUID, Mode]]) -> list[Published]:
    """Move chosen tasks to admitted and write their next attempts, in one statement; skips what moved meanwhile."""
    pairs = list(choices)
    rows = connection.execute(
        _ADMIT,
        {
            "tasks": [task_id for task_id, _ in pairs],
            "attempts": [uuids.uuid7() for _ in pairs],
            "modes": [mode.value for _, mode in pairs],
        },
    )
    return [_published(row) for row in rows]


def unpublished(connection: Connection, older_than_s: float, limit: int) -> list[Published]:
    """Attempts that nobody has claimed and whose hint was never sent, or sent longer ago than `older_than_s`."""
    rows = connection.execute(
        text(
            "SELECT id AS attempt_id, number, mode, resource_class FROM attempts WHERE state = 'dispatched'"
            " AND (published_at IS NULL OR published_at < clock_timestamp() - make_interval(secs => :age))"
            " ORDER BY dispatched_at LIMIT :limit"
        ),
        {"age": older_than_s, "limit": limit},
    )
    return [_published(row) for row in rows]


def mark_published(connection: Connection, hints: Sequence[Published]) -> None:
    """Note that these hints are in the broker."""
    connection.execute(
        text("UPDATE attempts SET published_at = clock_timestamp() WHERE id = ANY(:ids) AND state = 'dispatched'"),
        {"ids": [item.hint.attempt_id for item in hints]},
    )


def _published(row: Row[Any]) -> Published:
    return Published(Hint(attempt_id=row.attempt_id, number=row.number), Mode(row.mode), row.resource_class)


# --- Claim and lease ------------------------------------------------------------------------------------------------

_CLAIM = text("""
UPDATE attempts a SET state = 'running', instance_id = i.id, claimed_at = clock_timestamp(),
    phases = a.phases || jsonb_build_object('instance_ready', i.ready_at, 'claimed', clock_timestamp())
FROM instances i, tasks t
WHERE a.id = :attempt_id AND a.number = :number AND a.state = 'dispatched'
    AND i.id = :instance_id AND i.state = 'ready' AND i.attempt_id IS NULL AND i.mode = a.mode
    AND t.id = a.task_id AND t.state = 'admitted' AND t.attempts = a.number AND t.cancel_requested_at IS NULL
RETURNING a.id, a.task_id, a.mode, t.run_id, t.spec_digest
""")


def claim(database: Database, hint: Hint, instance_id: UUID, *, lease_s: float) -> Claim | None:
    """Take an attempt for an instance, with a lease; None when there is nothing to take (a stale or doubled hint).

    An ephemeral instance can take one in its life; the row says which.
    """
    with database.begin() as connection:
        if not _reserve(connection, instance_id):
            return None
        row = connection.execute(
            _CLAIM, {"attempt_id": hint.attempt_id, "number": hint.number, "instance_id": instance_id}
        ).first()
        return None if row is None else _settle_claim(connection, row, hint, instance_id, lease_s)


def claim_any(database: Database, instance_id: UUID, *, lease_s: float) -> Claim | None:
    """Take the oldest attempt that waits for an instance like this one: the answer to a stale hint."""
    with database.begin() as connection:
        row = connection.execute(
            text(
                "SELECT a.id, a.number FROM attempts a JOIN instances i"
                " ON i.mode = a.mode AND i.resource_class = a.resource_class"
                " WHERE i.id = :instance_id AND a.state = 'dispatched' ORDER BY a.dispatched_at"
                " LIMIT 1 FOR UPDATE OF a SKIP LOCKED"
            ),
            {"instance_id": instance_id},
        ).first()
    if row is None:
        return None
    return claim(database, Hint(attempt_id=row.id, number=row.number), instance_id, lease_s=lease_s)


def _reserve(connection: Connection, instance_id: UUID) -> bool:
    """Lock the instance's row: an ephemeral one cannot take two attempts, even in two threads."""
    statement = text("SELECT 1 FROM instances WHERE id = :id AND state = 'ready' AND attempt_id IS NULL FOR UPDATE")
    return connection.execute(statement, {"id": instance_id}).first() is not None


def _settle_claim(connection: Connection, row: Row[Any], hint: Hint, instance_id: UUID, lease_s: float) -> Claim:
    spec = spec_of(connection, row.spec_digest)
    ids = {"attempt_id": row.id, "task_id": row.task_id, "instance_id": instance_id}
    connection.execute(text("UPDATE tasks SET state = 'running' WHERE id = :task_id"), ids)
    if row.mode == Mode.EPHEMERAL:
        connection.execute(
            text("UPDATE instances SET state = 'busy', attempt_id = :attempt_id WHERE id = :instance_id"), ids
        )
    connection.execute(
        text(
            "INSERT INTO leases VALUES (:attempt_id, :instance_id, clock_timestamp() + make_interval(secs => :lease))"
        ),
        {**ids, "lease": lease_s},
    )
    deadline_at = connection.execute(
        text(
            "UPDATE attempts SET deadline_at = clock_timestamp() + make_interval(secs => :lifetime)"
            " WHERE id = :attempt_id RETURNING deadline_at"
        ),
        {**ids, "lifetime": spec.task.limits.lifetime_s},
    ).scalar_one()
    events.append(connection, Fact("attempt.claimed", row.run_id, row.task_id, row.id, instance_id))
    return Claim(row.id, hint.number, row.task_id, row.run_id, instance_id, Mode(row.mode), deadline_at, spec)


def renew(database: Database, attempt_ids: Sequence[UUID], *, lease_s: float) -> dict[UUID, bool]:
    """Renew leases in one statement: {attempt: must it stop?}. An attempt that is missing has lost its lease."""
    with database.begin() as connection:
        rows = connection.execute(
            text(
                "UPDATE leases l SET expires_at = clock_timestamp() + make_interval(secs => :lease)"
                " FROM attempts a JOIN tasks t ON t.id = a.task_id"
                " WHERE l.attempt_id = ANY(:ids) AND a.id = l.attempt_id AND a.state = 'running'"
                " RETURNING l.attempt_id, t.cancel_requested_at IS NOT NULL AS stop"
            ),
            {"ids": list(attempt_ids), "lease": lease_s},
        )
        return {row.attempt_id: row.stop for row in rows}


# --- Phases ---------------------------------------------------------------------------------------------------------


def pass_door(
    database: Database, claimed: Claim, phase: Phase, *, environment: Mapping[str, Any] | None = None
) -> None:
    """Record that the attempt passed a station's door now.

    Raises: StaleWriter.
    """
    with database.begin() as connection:
        moved = connection.execute(
            text(
                "UPDATE attempts SET phases = phases || jsonb_build_object(CAST(:phase AS text), clock_timestamp()),"
                " environment = environment || CAST(:environment AS jsonb)"
                " WHERE id = :id AND number = :number AND state = 'running' RETURNING id"
            ),
            {
                "phase": phase.value,
                "environment": json.dumps(dict(environment or {})),
                "id": claimed.attempt_id,
                "number": claimed.number,
            },
        ).first()
        if moved is None:
            raise _stale(claimed)
        events.append(connection, _fact(f"attempt.{phase.value}", claimed, dict(environment or {})))


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
        events.append(connection, _fact("attempt.torn_down", claimed, dict(found)))


def _fact(kind: str, claimed: Claim, data: dict[str, Any] | None = None) -> Fact:
    return Fact(kind, claimed.run_id, claimed.task_id, claimed.attempt_id, claimed.instance_id, data or {})


def _stale(claimed: Claim) -> StaleWriter:
    return StaleWriter(f"attempt {claimed.number} of task {claimed.task_id} is no longer the current one")


# --- Ends -----------------------------------------------------------------------------------------------------------


def finish(
    database: Database, claimed: Claim, *, end_reason: EndReason, verdict: Verdict, artifacts: Sequence[Artifact]
) -> None:
    """Record a graded attempt: the task has succeeded, whatever the reward.

    Raises: StaleWriter: nothing was written.
    """
    with database.begin() as connection:
        _end_attempt(connection, claimed, "finished", end_reason, verdict=verdict)
        _store_artifacts(connection, claimed.attempt_id, artifacts)
        _end_task(connection, claimed.task_id, "succeeded", end_reason, verdict=verdict)
        events.append(
            connection,
            _fact("attempt.finished", claimed, {"end_reason": end_reason.value, "reward": verdict.reward}),
        )
        events.wake_dispatcher(connection)


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
    state = {Blame.PERSON: "cancelled", Blame.INTERRUPTION: "interrupted"}.get(BLAME[end_reason], "error")
    with database.begin() as connection:
        _end_attempt(connection, claimed, state, end_reason, failure=failure)
        _store_artifacts(connection, claimed.attempt_id, artifacts)
        _after_failure(connection, claimed.task_id, end_reason, failure, permanent=permanent, retry=retry)
        events.append(
            connection,
            _fact(f"attempt.{state}", claimed, {"end_reason": end_reason.value, **failure.model_dump(mode="json")}),
        )
        events.wake_dispatcher(connection)


def lose(
    connection: Connection, attempt_ids: Sequence[UUID], failure: Failure, end_reason: EndReason, retry: RetryPolicy
) -> list[UUID]:
    """Take running attempts away from whoever had them, within the caller's transaction; returns those taken."""
    state = "interrupted" if BLAME[end_reason] is Blame.INTERRUPTION else "lost"
    rows = connection.execute(
        text(
            "UPDATE attempts a SET state = :state, finished_at = clock_timestamp(), end_reason = :reason,"
            " failure = CAST(:failure AS jsonb)"
            " FROM tasks t WHERE a.id = ANY(:ids) AND a.state = 'running' AND t.id = a.task_id"
            " RETURNING a.id, a.task_id, a.instance_id, t.run_id"
        ),
        {
            "state": state,
            "reason": end_reason.value,
            "failure": failure.model_dump_json(),
            "ids": list(attempt_ids),
        },
    ).all()
    for row in rows:
        connection.execute(text("DELETE FROM leases WHERE attempt_id = :id"), {"id": row.id})
        _after_failure(connection, row.task_id, end_reason, failure, permanent=False, retry=retry)
        data = {"end_reason": end_reason.value, "message": failure.message}
        events.append(connection, Fact(f"attempt.{state}", row.run_id, row.task_id, row.id, row.instance_id, data))
    if rows:
        events.wake_dispatcher(connection)
    return [row.id for row in rows]


def _end_attempt(
    connection: Connection,
    claimed: Claim,
    state: str,
    end_reason: EndReason,
    *,
    verdict: Verdict | None = None,
    failure: Failure | None = None,
) -> None:
    ended = connection.execute(
        text(
            "UPDATE attempts SET state = :state, finished_at = clock_timestamp(), end_reason = :reason,"
            " verdict = CAST(:verdict AS jsonb), failure = CAST(:failure AS jsonb)"
            " WHERE id = :id AND number = :number AND state = 'running' RETURNING id"
        ),
        {
            "state": state,
            "reason": end_reason.value,
            "verdict": verdict.model_dump_json() if verdict else None,
            "failure": failure.model_dump_json() if failure else None,
            "id": claimed.attempt_id,
            "number": claimed.number,
        },
    ).first()
    if ended is None:
        raise _stale(claimed)
    connection.execute(text("DELETE FROM leases WHERE attempt_id = :id"), {"id": claimed.attempt_id})


def _end_task(
    connection: Connection,
    task_id: UUID,
    state: str,
    end_reason: EndReason,
    *,
    verdict: Verdict | None = None,
    failure: Failure | None = None,
) -> None:
    connection.execute(
        text(
            "UPDATE tasks SET state = :state, finished_at = clock_timestamp(), end_reason = :reason,"
            " verdict = CAST(:verdict AS jsonb), failure = CAST(:failure AS jsonb) WHERE id = :id"
        ),
        {
            "state": state,
            "reason": end_reason.value,
            "verdict": verdict.model_dump_json() if verdict else None,
            "failure": failure.model_dump_json() if failure else None,
            "id": task_id,
        },
    )
    events.tell_outcome(connection, [task_id])


def _after_failure(
    connection: Connection,
    task_id: UUID,
    end_reason: EndReason,
    failure: Failure,
    *,
    permanent: bool,
    retry: RetryPolicy,
) -> None:
    """Decide by class what follows: cancelled, one more attempt, or not measured."""
    task = connection.execute(
        text("SELECT faults, max_attempts, cancel_requested_at FROM tasks WHERE id = :id FOR UPDATE"), {"id": task_id}
    ).one()
    blame = BLAME[end_reason]
    if blame is Blame.PERSON or task.cancel_requested_at is not None:
        _end_task(connection, task_id, "cancelled", EndReason.CANCELLED, failure=failure)
        return
    faults = task.faults + (blame is Blame.INFRASTRUCTURE)
    if permanent or blame is Blame.RESULT or faults >= task.max_attempts:
        _end_task(connection, task_id, "failed", end_reason, failure=failure)
        return
    connection.execute(
        text(
            "UPDATE tasks SET state = 'pending', faults = :faults,"
            " available_at = clock_timestamp() + make_interval(secs => :wait) WHERE id = :id"
        ),
        {"id": task_id, "faults": faults, "wait": retry.wait_s(faults) if faults else 0.0},
    )


def _store_artifacts(connection: Connection, attempt_id: UUID, artifacts: Sequence[Artifact]) -> None:
    if artifacts:
        connection.execute(
            text(
                "INSERT INTO artifacts (attempt_id, kind, key, url, size_bytes, sha256, missing)"
                " VALUES (:attempt_id, :kind, :key, :url, :size_bytes, :sha256, :missing)"
            ),
            [{"attempt_id": attempt_id, **artifact.model_dump(mode="json")} for artifact in artifacts],
        )
