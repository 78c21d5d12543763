"""Gives each group of a training run the replicas that it needs.

A group is complete with its quorum, or when all of its replicas have ended. Its remaining replicas then end as
`superseded`, in the same transaction. A replica that infrastructure lost is replaced by another one; so is a
straggler, if the run has `hedge_after`. Every decision is made on the locked row of the group. Lock order: group,
tasks, attempts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text
from uuid_utils import compat as uuids

from app.ledger import events, gradings, tasks
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.endings import BLAME, Blame, EndReason, RetryPolicy
from app.models.outcome import Failure

GRACE_S = 5.0
"""Seconds after the request in which a superseded attempt may stop; then it is taken away from its worker."""
SILENCE_S = 2.0
"""The same for a worker that has not renewed its lease since: it renews at once when it receives the request."""
_FAILURE = Failure(error="StaleWriter", message="its group is complete and its worker did not stop when told to")
_FAULTS = [reason.value for reason, blame in BLAME.items() if blame is Blame.INFRASTRUCTURE]


class Why(StrEnum):
    """Reasons for an added replica."""

    REPAIR = "repair"  # infrastructure lost one, after all of its attempts
    HEDGE = "hedge"  # one runs longer than most replicas of the run
    ADAPTIVE = "adaptive"  # the rewards of the first ones differ


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Facts on a group from its locked row and its tasks. `base`: replicas without repairs and hedges."""

    base: int
    most: int  # replicas that it may have if rewards differ
    quorum: int | None
    drop_equal: bool
    stored: int  # replicas with samples
    equal: bool  # all of these have one reward
    going: int  # replicas that may still bring samples
    live: int  # of these, the ones whose task has not ended
    stopped: int  # by a person, a deadline or a budget
    lost: int  # to infrastructure, after all of their attempts
    repairs: int
    hedges: int

    @property
    def need(self) -> int:
        """Number of replicas with samples that complete the group."""
        return self.base if self.quorum is None else min(self.quorum, self.base)


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """A decision on a group: close it in `state`, `add` replicas for the reason `why`, or wait (neither)."""

    state: str = ""
    add: int = 0
    why: Why = Why.REPAIR


def decide(facts: GroupFacts) -> GroupDecision:
    """Decides on a group: repairs until it can be complete, each lost replica once, at most as many as `base` replicas.

    With no repair left, the existing samples are handed out; without any, the group is `lost`. A group with a stopped
    replica gets no further ones.
    """
    if facts.stored < facts.need:
        short = facts.need - facts.stored - facts.going
        repairs = min(short, facts.lost - facts.repairs, facts.base - facts.repairs)
        if repairs > 0 and not facts.stopped:
            return GroupDecision(add=repairs)
        if facts.going:
            return GroupDecision()
        if not facts.stored:
            return GroupDecision("lost")
    if facts.base < facts.most and not facts.equal and not facts.stopped:
        return GroupDecision(add=facts.most - facts.base, why=Why.ADAPTIVE)
    return GroupDecision("equal" if facts.drop_equal and facts.stored > 1 and facts.equal else "ready")


def settle(connection: Connection, group_id: UUID) -> list[UUID]:
    """Closes a complete group, or adds replicas; returns its running attempts that are not needed and must be stopped.

    Its row is locked until the caller's transaction ends. A lost group is checked again: a user may have retried its
    tasks.
    """
    row = _locked(connection, group_id)
    if row is None:
        return []
    decision = decide(row.facts)
    if decision.add:
        _add(connection, row, decision.add, decision.why)
    elif decision.state and decision.state != row.state:
        return _close(connection, row, decision.state)
    return []


@dataclass(frozen=True, slots=True)
class _LockedGroup:
    id: UUID
    run_id: UUID
    state: str
    oldest: int | None
    facts: GroupFacts


_LOCK = text(
    "SELECT run_id, state FROM experience_groups WHERE group_id = :group AND state IN ('open', 'lost') FOR UPDATE"
)
# An attempt's samples are on record a moment after its end. A task without attempts has none.
_FACTS = text("""
SELECT r.most_replicas, e.quorum, e.drop_equal, s.*, t.*
FROM experience_runs e JOIN runs r ON r.id = e.run_id
CROSS JOIN LATERAL (
    SELECT count(*) AS stored, coalesce(min(reward) = max(reward), true) AS equal,
        CASE WHEN bool_and(oldest IS NOT NULL) THEN min(oldest) END AS oldest
    FROM experience_attempts WHERE group_id = :group AND state = 'stored'
) s CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE added_for IS NULL OR added_for = 'adaptive') AS base,
        count(*) FILTER (WHERE added_for = 'repair') AS repairs,
        count(*) FILTER (WHERE added_for = 'hedge') AS hedges,
        count(*) FILTER (WHERE state NOT IN ('succeeded', 'failed', 'cancelled') OR attempts > 0 AND NOT EXISTS (
            SELECT FROM experience_attempts x JOIN attempts a ON a.id = x.attempt_id
            WHERE a.task_id = k.id AND a.number = k.attempts)) AS going,
        count(*) FILTER (WHERE state NOT IN ('succeeded', 'failed', 'cancelled')) AS live,
        count(*) FILTER (WHERE state = 'cancelled' AND end_reason <> 'superseded') AS stopped,
        count(*) FILTER (WHERE state = 'failed' AND verdict IS NULL AND faults >= max_attempts
            AND end_reason = ANY(:faults)) AS lost
    FROM tasks k WHERE k.run_id = :run AND k.group_id = :group
) t WHERE e.run_id = :run
""")


def _locked(connection: Connection, group_id: UUID) -> _LockedGroup | None:
    """Locks an open or lost group and reads its facts. None: it is closed."""
    held = connection.execute(_LOCK, {"group": group_id}).first()
    if held is None:
        return None
    values = {"group": group_id, "run": held.run_id, "faults": _FAULTS}
    facts = dict(connection.execute(_FACTS, values).one()._mapping)
    oldest, most = facts.pop("oldest"), facts.pop("most_replicas")
    return _LockedGroup(group_id, held.run_id, held.state, oldest, GroupFacts(most=most or 0, **facts))


def _close(connection: Connection, group: _LockedGroup, state: str) -> list[UUID]:
    values = {"group": group.id, "run": group.run_id, "state": state, "oldest": group.oldest}
    sql(
        connection,
        "UPDATE experience_groups SET state = :state, closed_at = clock_timestamp(), oldest = :oldest,"
        " detail = CASE WHEN :state <> 'lost' THEN '' ELSE (SELECT string_agg(n || ' ' || reason, ', ') FROM"
        " (SELECT coalesce(end_reason, '') AS reason, count(*) AS n FROM tasks WHERE run_id = :run"
        " AND group_id = :group GROUP BY 1 ORDER BY 2 DESC, 1) ends) END WHERE group_id = :group",
        values,
    )
    events.append(connection, Fact(f"group.{state}", group.run_id, data={"group": str(group.id)}))
    needless = sql(
        connection,
        "SELECT id FROM tasks WHERE run_id = :run AND group_id = :group"
        " AND state IN ('pending', 'admitted', 'running')",
        values,
    )
    ids = list(needless.scalars())
    events.wake_dispatcher(connection)
    return tasks.end(connection, ids, EndReason.SUPERSEDED)[0] if ids else []


# Replicas of a group differ only in id and number; the dispatcher puts them in the queue.
_ADD = text("""
WITH first AS (
    SELECT * FROM tasks WHERE run_id = :run AND group_id = :group ORDER BY replica LIMIT 1
), last AS (
    SELECT max(replica) AS replica FROM tasks WHERE run_id = :run AND group_id = :group
)
INSERT INTO tasks (id, run_id, group_id, replica, spec_digest, name, agent, model, user_name, requested_mode,
    resource_class, priority, max_attempts, lifetime_s, in_line, bounded, graded_apart, group_started, deadline_at,
    added_for)
SELECT n.id, f.run_id, f.group_id, last.replica + n.ord, f.spec_digest, f.name, f.agent, f.model, f.user_name,
    f.requested_mode, f.resource_class, f.priority, f.max_attempts, f.lifetime_s, false, f.bounded, f.graded_apart,
    true, r.deadline_at, :why
FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY AS n(id, ord), first f, last, runs r WHERE r.id = :run
""")


def _add(connection: Connection, group: _LockedGroup, count: int, why: Why) -> None:
    ids = [uuids.uuid7() for _ in range(count)]
    values: Mapping[str, Any] = {"run": group.run_id, "group": group.id, "ids": ids, "why": why.value}
    connection.execute(_ADD, values)
    total = {"count": count, "run": group.run_id}
    sql(connection, "UPDATE runs SET total = total + :count WHERE id = :run", total)
    reopened = "UPDATE experience_groups SET state = 'open', closed_at = NULL, detail = '' WHERE group_id = :group"
    sql(connection, f"{reopened} AND state = 'lost'", {"group": group.id})
    data = {"group": str(group.id), "for": why.value}
    events.append(connection, *(Fact("task.added", group.run_id, one, data=data) for one in ids))
    events.wake_dispatcher(connection)


@dataclass(frozen=True, slots=True)
class NoticesDue:
    """Notices due. `stop`: attempts to be stopped. `silent`: instances that did not renew a lease after the request."""

    stop: list[UUID]
    silent: list[UUID]


def tend(database: Database, lease_s: float, retry: RetryPolicy) -> NoticesDue:
    """Settles groups whose last replica was cancelled before it began, hedges stragglers, stops superseded attempts.
    Called about every second."""
    with database.begin() as connection:
        due = stop_superseded(connection, lease_s, retry)
        idle = list(connection.execute(_IDLE).scalars())
        late = list(connection.execute(_STRAGGLING, {"group": None}).scalars())
    for group_id in idle:
        with database.begin() as connection:
            due.stop.extend(settle(connection, group_id))
    for group_id in late:
        with database.begin() as connection:
            _hedge(connection, group_id)
    return due


_IDLE = text("""
SELECT g.group_id FROM experience_groups g WHERE g.state = 'open' AND NOT EXISTS (
    SELECT FROM tasks t WHERE t.run_id = g.run_id AND t.group_id = g.group_id
        AND t.state NOT IN ('succeeded', 'failed', 'cancelled'))
""")

# A percentile is only meaningful if one duration lies beyond it: from 20 durations on for the 95th.
_STRAGGLING = text("""
WITH usual AS MATERIALIZED (
    SELECT r.id AS run_id, percentile_cont(r.hedge_after / 100.0) WITHIN GROUP (
        ORDER BY extract(epoch FROM a.finished_at - a.claimed_at)::float8) AS seconds
    FROM runs r JOIN experience_runs e ON e.run_id = r.id
    JOIN tasks t ON t.run_id = r.id AND t.state = 'succeeded'
    JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
    WHERE r.hedge_after IS NOT NULL
        AND EXISTS (SELECT FROM experience_groups g WHERE g.run_id = r.id AND g.state = 'open'
            AND (CAST(:group AS uuid) IS NULL OR g.group_id = :group))
    GROUP BY r.id, r.hedge_after HAVING count(*) * (100 - r.hedge_after) >= 100
)
SELECT g.group_id FROM usual u JOIN experience_groups g ON g.run_id = u.run_id AND g.state = 'open'
CROSS JOIN LATERAL (
    SELECT bool_and(t.state = 'running' AND a.claimed_at < clock_timestamp() - make_interval(secs => u.seconds)) AS late
    FROM tasks t LEFT JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
    WHERE t.run_id = g.run_id AND t.group_id = g.group_id AND t.state IN ('pending', 'admitted', 'running')
) s WHERE s.late AND (CAST(:group AS uuid) IS NULL OR g.group_id = :group)
""")


def _hedge(connection: Connection, group_id: UUID) -> None:
    """Adds a replica for each missing one, while all unfinished ones are stragglers; at most `base` hedges a group."""
    group = _locked(connection, group_id)
    if group is None or connection.execute(_STRAGGLING, {"group": group_id}).first() is None:
        return
    facts = group.facts
    missing = facts.need - facts.stored - (facts.going - facts.live)
    count = min(missing, facts.live, facts.base - facts.hedges)
    if count > 0 and not facts.stopped:
        _add(connection, group, count, Why.HEDGE)


_SUPERSEDED = text("""
SELECT a.id, a.instance_id, t.cancel_requested_at < clock_timestamp() - make_interval(secs => :grace) AS slow,
    t.cancel_requested_at < clock_timestamp() - make_interval(secs => :silence)
        AND coalesce(l.expires_at < t.cancel_requested_at + make_interval(secs => :lease), true) AS silent, a.state
FROM tasks t JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts LEFT JOIN leases l ON l.attempt_id = a.id
WHERE t.cancel_reason = 'superseded' AND t.state = 'running' AND a.state IN ('running', 'grading')
FOR UPDATE OF a SKIP LOCKED
""")


def stop_superseded(connection: Connection, lease_s: float, retry: RetryPolicy) -> NoticesDue:
    """Finds superseded running attempts, as a stop request may be lost; takes away those that did not stop in time."""
    rows = connection.execute(_SUPERSEDED, {"grace": GRACE_S, "silence": SILENCE_S, "lease": lease_s}).all()
    away = [row.id for row in rows if row.slow or row.silent]
    gradings.take_away(connection, away, _FAILURE, EndReason.SUPERSEDED, retry)
    silent = [row.instance_id for row in rows if row.silent and row.state == "running"]
    return NoticesDue([row.id for row in rows], silent)
