"""Defines the invariants as queries; each query returns the ids of the rows that violate it.

Ages count from the transaction's start, never later than its snapshot; states that change within one transaction need
no age limit. Parameters: see `app.ledger.audit.parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    CRITICAL = "critical"  # a promise is broken: work may be lost or done twice
    ERROR = "error"  # something is stuck or leaks until it is repaired
    WARNING = "warning"  # slow, late or odd: an operator should look at it


class Repair(StrEnum):
    """Repair that may be applied without confirmation."""

    CLOSE = "the attempt is closed; its task goes on without it"
    LOSE = "the attempt is taken back as lost, and its task runs again"
    PUT_BACK = "the grading waits for another grader"
    REQUEUE = "the task goes back in line"
    IN_LINE = "the task is put in line"
    SETTLE = "the task is released or cancelled, as what it waits for has ended"
    NUMBER = "the task's number is set to that of its last attempt"
    CANCEL = "the cancellation is carried out"
    FREE = "the row is deleted"
    EXIT = "the instance's row is closed; the reconciler ends what is left of it"


@dataclass(frozen=True, slots=True)
class Invariant:
    """An invariant. `table` is the table of its ids, whose rows a repair locks."""

    name: str
    severity: Severity
    means: str
    query: str
    table: str = ""
    repair: Repair | None = None


_ATTEMPTS = (
    Invariant(
        "attempt.not_current",
        Severity.CRITICAL,
        "a live attempt that is not its task's current one, or whose task waits or has ended",
        "SELECT a.id FROM attempts a JOIN tasks t ON t.id = a.task_id"
        " WHERE a.state IN ('dispatched', 'running', 'grading')"
        " AND (a.number < t.attempts OR t.state NOT IN ('admitted', 'running'))",
        "attempts",
        Repair.CLOSE,
    ),
    Invariant(
        "attempt.out_of_step",
        Severity.CRITICAL,
        "an attempt runs while its task is only admitted",
        "SELECT a.id FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE a.state = 'running'"
        " AND a.number = t.attempts AND t.state = 'admitted'",
        "attempts",
        Repair.LOSE,
    ),
    Invariant(
        "task.without_attempt",
        Severity.CRITICAL,
        "admitted or running, but its attempt is not: nobody works on it and nobody will",
        "SELECT t.id FROM tasks t WHERE t.state IN ('admitted', 'running') AND NOT EXISTS (SELECT FROM attempts a"
        " WHERE a.task_id = t.id AND a.number = t.attempts AND (a.state IN ('running', 'grading')"
        " OR a.state = 'dispatched' AND t.state = 'admitted' OR a.state = 'finished'))",
        "tasks",
        Repair.REQUEUE,
    ),
    Invariant(
        "task.finished_not_ended",
        Severity.CRITICAL,
        "its attempt was graded and the task does not know; it must not run again: `megaflow show TASK`",
        "SELECT t.id FROM tasks t JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts"
        " WHERE t.state IN ('pending', 'admitted', 'running') AND a.state = 'finished'",
    ),
    Invariant(
        "task.number_behind",
        Severity.CRITICAL,
        "there is an attempt with a higher number than the task knows: the next one could not be written",
        "SELECT t.id FROM tasks t"
        " WHERE (t.finished_at IS NULL OR t.finished_at > now() - make_interval(secs => :recent))"
        " AND EXISTS (SELECT FROM attempts a WHERE a.task_id = t.id AND a.number > t.attempts)",
        "tasks",
        Repair.NUMBER,
    ),
    Invariant(
        "task.number_ahead",
        Severity.ERROR,
        "the task's number is higher than that of its last attempt: evidence is missing",
        "SELECT t.id FROM tasks t WHERE t.attempts > 0"
        " AND (t.finished_at IS NULL OR t.finished_at > now() - make_interval(secs => :recent))"
        " AND NOT EXISTS (SELECT FROM attempts a WHERE a.task_id = t.id AND a.number >= t.attempts)",
    ),
)

_LEASES = (
    Invariant(
        "attempt.without_lease",
        Severity.CRITICAL,
        "an attempt runs without a lease: nobody would notice its loss",
        "SELECT a.id FROM attempts a WHERE a.state = 'running'"
        " AND NOT EXISTS (SELECT FROM leases l WHERE l.attempt_id = a.id)",
        "attempts",
        Repair.LOSE,
    ),
    Invariant(
        "lease.orphan",
        Severity.ERROR,
        "a lease of an attempt that does not run, or whose grading waits",
        "SELECT l.attempt_id AS id FROM leases l LEFT JOIN attempts a ON a.id = l.attempt_id"
        " LEFT JOIN gradings g ON g.attempt_id = a.id"
        " WHERE a.state IS DISTINCT FROM 'running' AND g.instance_id IS NULL",
        "leases",
        Repair.FREE,
    ),
    Invariant(
        "attempt.on_dead_instance",
        Severity.CRITICAL,
        "an attempt runs on an instance that has ended",
        "SELECT a.id FROM attempts a LEFT JOIN instances i ON i.id = a.instance_id WHERE a.state = 'running'"
        " AND (i.id IS NULL OR i.state IN ('terminated', 'failed'))",
        "attempts",
        Repair.LOSE,
    ),
    Invariant(
        "lease.lapsed",
        Severity.WARNING,
        "a lease lapsed long ago and the attempt was not taken back: is a reconciler at work?",
        "SELECT l.attempt_id AS id FROM leases l JOIN attempts a ON a.id = l.attempt_id WHERE a.state = 'running'"
        " AND l.expires_at < now() - make_interval(secs => :lapsed)",
        "attempts",
        Repair.LOSE,
    ),
)

_GRADINGS = (
    Invariant(
        "attempt.grading_nowhere",
        Severity.CRITICAL,
        "an attempt waits for a grading that is not queued",
        "SELECT a.id FROM attempts a WHERE a.state = 'grading'"
        " AND NOT EXISTS (SELECT FROM gradings g WHERE g.attempt_id = a.id)",
        "attempts",
        Repair.LOSE,
    ),
    Invariant(
        "grading.orphan",
        Severity.ERROR,
        "the grading of an attempt that is not to be graded",
        "SELECT g.attempt_id AS id FROM gradings g LEFT JOIN attempts a ON a.id = g.attempt_id"
        " WHERE a.state IS DISTINCT FROM 'grading'",
        "gradings",
        Repair.FREE,
    ),
    Invariant(
        "grading.abandoned",
        Severity.CRITICAL,
        "a grading is claimed, but its grader has ended, or its lease is missing or lapsed long ago",
        "SELECT a.id FROM gradings g JOIN attempts a ON a.id = g.attempt_id LEFT JOIN instances i"
        " ON i.id = g.instance_id LEFT JOIN leases l ON l.attempt_id = g.attempt_id AND l.instance_id = g.instance_id"
        " WHERE a.state = 'grading' AND g.instance_id IS NOT NULL AND (l.attempt_id IS NULL OR i.id IS NULL"
        " OR i.state IN ('terminated', 'failed') OR l.expires_at < now() - make_interval(secs => :lapsed))",
        "attempts",
        Repair.PUT_BACK,
    ),
    Invariant(
        "grading.unclaimed",
        Severity.WARNING,
        "queued for grading long ago, and no grader of its class is there: do instances become ready?",
        "SELECT g.attempt_id AS id FROM gradings g WHERE g.instance_id IS NULL"
        " AND g.available_at < now() - make_interval(secs => :unclaimed) AND NOT EXISTS (SELECT FROM instances i"
        " WHERE i.mode = 'grading' AND i.resource_class = g.resource_class AND i.state = 'ready')",
    ),
)

_INSTANCES = (
    Invariant(
        "slots.pool_over",
        Severity.CRITICAL,
        "admitted to a pool although all slots that it had then were taken",
        """
        SELECT a.id FROM (SELECT a.id, a.resource_class, a.dispatched_at,
                row_number() OVER (PARTITION BY a.resource_class ORDER BY a.dispatched_at, a.id) AS place
            FROM attempts a WHERE a.state IN ('dispatched', 'running') AND a.mode = 'persistent') a
        LEFT JOIN (SELECT i.resource_class, sum(i.slots) AS slots FROM instances i
            WHERE i.mode = 'persistent' AND i.state NOT IN ('terminated', 'failed') AND i.ready_at IS NOT NULL
            GROUP BY 1) now USING (resource_class)
        WHERE CASE WHEN a.place <= coalesce(now.slots, 0) THEN false ELSE a.place > (
            SELECT coalesce(sum(i.slots), 0) FROM instances i WHERE i.mode = 'persistent'
                AND i.resource_class = a.resource_class AND i.ready_at <= a.dispatched_at
                AND (i.ended_at IS NULL OR i.ended_at > a.dispatched_at - interval '5 s')) END""",
    ),
    Invariant(
        "instance.over_slots",
        Severity.ERROR,
        "more attempts run on an instance than it has slots, or gradings",
        "SELECT i.id FROM (SELECT instance_id FROM attempts WHERE state = 'running' UNION ALL SELECT instance_id"
        " FROM gradings) a JOIN instances i ON i.id = a.instance_id GROUP BY i.id HAVING count(*) > i.slots",
    ),
    Invariant(
        "instance.used_twice",
        Severity.CRITICAL,
        "an ephemeral instance took more than one attempt",
        "SELECT i.id FROM instances i JOIN attempts a ON a.instance_id = i.id WHERE i.mode = 'ephemeral'"
        " AND (i.state NOT IN ('terminated', 'failed') OR i.ended_at > now() - make_interval(secs => :recent))"
        # Except attempts without an agent: they only grade again what the earlier attempt left.
        " AND NOT coalesce((a.phases->>'agent_started')::timestamptz < a.claimed_at, false)"
        " GROUP BY i.id HAVING count(*) > 1",
    ),
    Invariant(
        "instance.never_ready",
        Severity.WARNING,
        "asked for long ago, never ready, and not given up: is a reconciler at work?",
        "SELECT i.id FROM instances i WHERE i.state IN ('requested', 'booting')"
        " AND i.requested_at < now() - make_interval(secs => :booting)",
        "instances",
        Repair.EXIT,
    ),
    Invariant(
        "instance.overstays",
        Severity.ERROR,
        "an ephemeral instance whose attempt ended long ago",
        "SELECT i.id FROM instances i JOIN attempts a ON a.id = i.attempt_id"
        " WHERE i.state NOT IN ('terminated', 'failed')"
        " AND i.mode = 'ephemeral' AND a.state NOT IN ('dispatched', 'running')"
        " AND coalesce((a.phases->>'grading_queued')::timestamptz, a.finished_at)"
        " < now() - make_interval(secs => :overstay)",
        "instances",
        Repair.EXIT,
    ),
    Invariant(
        "instance.stray",
        Severity.ERROR,
        "an ephemeral instance that has been ready for long and took no attempt",
        "SELECT i.id FROM instances i WHERE i.mode = 'ephemeral' AND i.state IN ('ready', 'draining')"
        " AND i.attempt_id IS NULL AND coalesce(i.ready_at, i.requested_at) < now() - make_interval(secs => :idle)",
        "instances",
        Repair.EXIT,
    ),
    Invariant(
        "instance.overdue",
        Severity.ERROR,
        "an instance past its deadline that was not ended: is a reconciler at work?",
        "SELECT i.id FROM instances i WHERE i.state NOT IN ('terminated', 'failed')"
        " AND i.deadline_at < now() - make_interval(secs => :overstay)",
        "instances",
        Repair.EXIT,
    ),
    Invariant(
        "instance.without_pool",
        Severity.WARNING,
        "a standing instance of a resource class that is not defined",
        "SELECT i.id FROM instances i WHERE i.mode = 'persistent' AND i.state NOT IN ('terminated', 'failed')"
        " AND NOT EXISTS (SELECT FROM resource_classes c WHERE c.name = i.resource_class)",
    ),
    Invariant(
        "engine_object.left_behind",
        Severity.ERROR,
        "a container, volume or folder stands although its instance ended long ago: it would not go, or its host is"
        " away; `megaflow receipt RUN` names it, the log of its host says why (sweeper.refused)",
        "SELECT o.engine_id AS id FROM created_resources o JOIN instances i ON i.id = o.instance_id"
        " WHERE o.destroyed_at IS NULL AND o.kind <> 'network'"
        " AND i.state IN ('terminated', 'failed')"
        " AND coalesce(i.swept_at, i.ended_at + make_interval(secs => :overstay))"
        " < now() - make_interval(secs => :overstay)",
    ),
)

_WAITING = (
    Invariant(
        "task.delay_over",
        Severity.ERROR,
        "its delay is over, or its pause was lifted, and nobody put it back in line",
        "SELECT t.id FROM tasks t WHERE t.state = 'pending' AND NOT t.in_line AND NOT t.waits"
        " AND NOT EXISTS (SELECT FROM pauses p WHERE p.kind = 'run' AND p.name = t.run_id::text)"
        " AND (t.available_at < now() - make_interval(secs => :patience)"
        " OR t.available_at >= CAST(:paused AS timestamptz))",
        "tasks",
        Repair.IN_LINE,
    ),
    Invariant(
        "task.waits_for_nothing",
        Severity.ERROR,
        "it waits for tasks that have all ended, or for one that failed, and was neither released nor cancelled",
        "SELECT t.id FROM tasks t WHERE t.state = 'pending' AND t.waits"
        " AND t.accepted_at < now() - make_interval(secs => :patience)"
        " AND (SELECT coalesce(bool_and(u.state = 'succeeded') OR bool_or(u.state IN ('failed', 'cancelled')), true)"
        " AND coalesce(max(u.finished_at) < now() - make_interval(secs => :patience), true)"
        " FROM task_dependencies d JOIN tasks u ON u.id = d.on_task WHERE d.run_id = t.run_id)",
        "tasks",
        Repair.SETTLE,
    ),
    Invariant(
        "task.begun_too_early",
        Severity.CRITICAL,
        "it was admitted although a task that it comes after has not succeeded",
        "SELECT t.id FROM tasks t WHERE t.state IN ('admitted', 'running') AND EXISTS (SELECT FROM task_dependencies d"
        " JOIN tasks u ON u.id = d.on_task WHERE d.run_id = t.run_id AND u.state <> 'succeeded')",
    ),
    Invariant(
        "task.cancelled_yet_waiting",
        Severity.ERROR,
        "it was cancelled and still waits: nothing admits it and nothing ends it",
        "SELECT t.id FROM tasks t WHERE t.state IN ('pending', 'admitted')"
        " AND t.cancel_requested_at < now() - make_interval(secs => :patience)",
        "tasks",
        Repair.CANCEL,
    ),
    Invariant(
        "task.ignores_cancel",
        Severity.WARNING,
        "told to stop long ago, and running still",
        "SELECT t.id FROM tasks t WHERE t.state = 'running'"
        " AND t.cancel_requested_at < now() - make_interval(secs => :overstay)",
    ),
    Invariant(
        "task.expired_yet_waiting",
        Severity.WARNING,
        "its deadline passed long ago and it was not ended: is a control worker there?",
        "SELECT t.id FROM tasks t WHERE t.state IN ('pending', 'admitted')"
        " AND t.deadline_at < now() - make_interval(secs => :patience)",
    ),
    Invariant(
        "task.tries_used_up",
        Severity.WARNING,
        "it waits for another attempt although its faults have used up all",
        "SELECT t.id FROM tasks t WHERE t.state = 'pending' AND t.faults >= t.max_attempts AND t.faults > 0",
    ),
    Invariant(
        "attempt.unclaimed",
        Severity.WARNING,
        "dispatched long ago and claimed by nobody: do instances become ready?",
        "SELECT a.id FROM attempts a WHERE a.state = 'dispatched'"
        " AND a.dispatched_at < now() - make_interval(secs => :unclaimed)",
    ),
    Invariant(
        "hold.orphan",
        Severity.WARNING,
        "a place at a limit whose holder has long stopped renewing it",
        "SELECT h.limit_name || ' ' || h.holder AS id FROM semaphore_holders h"
        " LEFT JOIN attempts a ON a.id = h.attempt_id LEFT JOIN instances i ON i.id = h.instance_id"
        " WHERE h.expires_at < now() - make_interval(secs => :patience)"
        " AND NOT (coalesce(a.state IN ('running', 'grading'), a.id IS NULL AND i.id IS NOT NULL)"
        " AND coalesce(i.state NOT IN ('terminated', 'failed'), true))",
        "semaphore_holders",
        Repair.FREE,
    ),
    Invariant(
        "transaction.old",
        Severity.WARNING,
        "a writing transaction has been open for long: consumers of the event stream wait for its end",
        "SELECT 'pid ' || pid || ' ' || coalesce(application_name, '') AS id FROM pg_stat_activity"
        " WHERE backend_xid IS NOT NULL AND xact_start < now() - make_interval(secs => :transaction)"
        " UNION ALL SELECT 'prepared ' || gid FROM pg_prepared_xacts"
        " WHERE prepared < now() - make_interval(secs => :transaction)",
    ),
)

_GROUPS = (
    Invariant(
        "task.superseded_with_verdict",
        Severity.CRITICAL,
        "its group was complete without it, and yet it has a verdict, which would count",
        "SELECT t.id FROM tasks t WHERE t.end_reason = 'superseded' AND t.verdict IS NOT NULL"
        " AND t.finished_at > now() - make_interval(secs => :recent)",
    ),
    Invariant(
        "group.not_closed",
        Severity.ERROR,
        "all of its replicas ended long ago, what they brought is on record, and it is neither complete nor repaired:"
        " is a control worker there?",
        "SELECT g.group_id AS id FROM experience_groups g WHERE g.state = 'open'"
        " AND (SELECT bool_and(t.finished_at < now() - make_interval(secs => :patience) AND (t.attempts = 0 OR EXISTS ("
        "SELECT FROM experience_attempts x JOIN attempts a ON a.id = x.attempt_id WHERE a.task_id = t.id"
        " AND a.number = t.attempts))) FROM tasks t WHERE t.run_id = g.run_id AND t.group_id = g.group_id)",
    ),
    Invariant(
        "group.ready_without_samples",
        Severity.CRITICAL,
        "it is offered to a trainer, and no replica of it has samples",
        "SELECT g.group_id AS id FROM experience_groups g WHERE g.state = 'ready' AND NOT EXISTS ("
        "SELECT FROM experience_attempts x WHERE x.group_id = g.group_id AND x.state = 'stored')",
    ),
)

CHECKS = (*_ATTEMPTS, *_LEASES, *_GRADINGS, *_INSTANCES, *_WAITING, *_GROUPS)

LINES = """
SELECT t.requested_mode AS mode, t.resource_class, count(*) AS waiting,
    extract(epoch FROM now() - min(t.accepted_at))::float8 AS oldest_s
FROM tasks t WHERE t.state = 'pending' AND t.in_line GROUP BY 1, 2
"""
"""Waiting tasks, by requested mode and class."""

AGES = """
SELECT
    (SELECT extract(epoch FROM now() - min(dispatched_at))::float8 FROM attempts WHERE state = 'dispatched')
        AS oldest_unclaimed_s,
    (SELECT extract(epoch FROM now() - min(claimed_at))::float8 FROM attempts a WHERE state = 'running'
        AND NOT EXISTS (SELECT FROM leases l WHERE l.attempt_id = a.id)) AS oldest_unleased_s,
    (SELECT extract(epoch FROM now() - min(xact_start))::float8 FROM pg_stat_activity WHERE backend_xid IS NOT NULL)
        AS oldest_transaction_s
"""
