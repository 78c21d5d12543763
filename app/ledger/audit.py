"""Checks the ledger's invariants in one snapshot, and repairs what is safe to repair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from app.ledger import classes, ends, events, gradings, graphs, instances, limits, quotas, tasks
from app.ledger.audit_checks import AGES, CHECKS, LINES, Invariant, Repair, Severity
from app.ledger.classes import STANDARD, ResourceClass
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.endings import EndReason, RetryPolicy
from app.models.outcome import Failure
from app.models.spec import Mode
from app.models.tables import PAUSED
from app.settings import Settings

SHOWN = 20
"""Ids that a finding names."""
_AT_ONCE = 1000
"""Rows of one kind repaired in one pass."""
_RECENT_S = 3600.0
"""Age limit of ended tasks and instances in the periodic audit, in seconds; earlier audits checked the older ones."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A violated invariant. `ids`: the first of `count`."""

    name: str
    severity: Severity
    means: str
    count: int
    ids: tuple[str, ...]
    repair: Repair | None = None
    repaired: int | None = None  # rows; None: no repair was tried


@dataclass(frozen=True, slots=True)
class Memory:
    """Most use of each limit that counts as allowed: the limit may have been lowered after the use was granted."""

    allowed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Result of one audit. Ages in seconds; None: there is none."""

    findings: tuple[AuditFinding, ...]
    ages: Mapping[str, float | None]
    lines: Mapping[str, tuple[int, float]]  # by requested mode and class: waiting tasks, age of the oldest
    memory: Memory
    every: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by finding: its ids, at most `_AT_ONCE`


def parameters(settings: Settings, *, recent_s: float = _RECENT_S) -> dict[str, Any]:
    """Returns the queries' parameters: the ages, in seconds, from which a state counts as stuck, among others."""
    patience = max(60.0, 3 * settings.sweep_s)
    return {
        "recent": recent_s,
        "patience": patience,
        "lapsed": settings.lease_s + patience,
        "booting": settings.boot_timeout_s + patience,
        "idle": settings.ephemeral_idle_s + patience,
        "overstay": patience + 60.0,
        "unclaimed": settings.boot_timeout_s + 2 * settings.republish_s + patience,
        "transaction": patience,
        "paused": PAUSED,
    }


def look(
    database: Database, settings: Settings, memory: Memory | None = None, *, recent_s: float = _RECENT_S
) -> AuditResult:
    """Runs every check in one snapshot; changes nothing.

    memory: from the previous audit, so that a limit lowered since then does not count as violated. recent_s: age limit,
    in seconds, of the ended tasks and instances that are checked.
    """
    values = parameters(settings, recent_s=recent_s)
    with database.begin() as connection:
        sql(connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        checked = [_checked(connection, check, values) for check in CHECKS]
        over, remembered = _over_use(connection, settings, memory or Memory())
        defined = classes.load(connection, settings)
        lines = {
            f"{row.mode}.{row.resource_class}": (Mode(row.mode), row.resource_class, row.waiting, row.oldest_s)
            for row in sql(connection, LINES)
        }
        closed = _no_capacity(connection, defined, [(mode, name) for mode, name, _, _ in lines.values()])
        ages = dict(sql(connection, AGES).one()._mapping)
    findings = [finding for finding, _ in checked if finding.count]
    return AuditResult(
        findings=(*findings, *over, *closed),
        ages=ages,
        lines={queue: (waiting, oldest_s) for queue, (_, _, waiting, oldest_s) in lines.items()},
        memory=remembered,
        every={finding.name: ids for finding, ids in checked if finding.count},
    )


def _checked(
    connection: Connection, check: Invariant, values: Mapping[str, Any]
) -> tuple[AuditFinding, tuple[str, ...]]:
    statement = f"SELECT id::text AS id, count(*) OVER () AS n FROM ({check.query}) found LIMIT {_AT_ONCE}"  # noqa: S608
    rows = sql(connection, statement, values).all()
    ids = tuple(row.id for row in rows)
    count = rows[0].n if rows else 0
    return AuditFinding(check.name, check.severity, check.means, count, ids[:SHOWN], check.repair), ids


_EPHEMERAL = "slots:ephemeral."
_TIERS = {
    "slots": "more ephemeral attempts are live than the class has capacity for",
    "hold": "more places of a limit are held than it has",
    "running": "a user has more live attempts than their quota",
    "instances": "a user has more ephemeral instances in use than their quota",
}


def _over_use(connection: Connection, settings: Settings, memory: Memory) -> tuple[list[AuditFinding], Memory]:
    """Finds use above capacity. Use that was within capacity when granted may continue: only growth above it counts."""
    over: dict[str, list[str]] = {}
    allowed: dict[str, float] = {}
    for tier, name, used, most in _uses(connection, settings):
        key, capacity = f"{tier}:{name}", float("inf") if most is None else float(most)
        bound = max(capacity, memory.allowed.get(key, 0.0))
        if used > bound:
            over.setdefault(tier, []).append(f"{name}: {used:g} of {most:g}")
        allowed[key] = bound if used > bound else max(used, capacity)
    findings = [
        AuditFinding(f"{tier}.over_capacity", Severity.CRITICAL, _TIERS[tier], len(keys), tuple(sorted(keys)[:SHOWN]))
        for tier, keys in over.items()
    ]
    return findings, Memory(allowed)


def _uses(connection: Connection, settings: Settings) -> Iterator[tuple[str, str, float, float | None]]:
    """Yields tier, name, use and capacity of every limit that has holders."""
    for use in limits.uses(connection, settings):
        if use.name.startswith(_EPHEMERAL):
            yield "slots", use.name.removeprefix(_EPHEMERAL), use.used or 0, use.capacity
        elif not use.name.startswith("slots:"):
            yield "hold", use.name, use.used or 0, use.capacity
    for user in quotas.usages(connection):
        yield "running", user.user, user.running, user.quota.running
        yield "instances", user.user, user.instances, user.quota.instances


def _no_capacity(
    connection: Connection, defined: Mapping[str, ResourceClass], lines: Iterable[tuple[Mode, str]]
) -> list[AuditFinding]:
    """Finds queues with tasks that no instance will ever take: their class has no capacity for the mode."""
    pools = set(
        sql(
            connection,
            "SELECT DISTINCT resource_class FROM instances"
            " WHERE mode = 'persistent' AND state NOT IN ('terminated', 'failed')",
        ).scalars()
    )
    closed = sorted(
        f"{mode.value}.{name}"
        for mode, name in lines
        if not (name in defined and defined[name].could_run(mode))
        and not (mode is not Mode.EPHEMERAL and name in pools)
    )
    if not closed:
        return []
    means = f"tasks wait for a class without capacity for them; e.g. `megaflow classes set {STANDARD} --ephemeral 4`"
    return [AuditFinding("line.without_capacity", Severity.WARNING, means, len(closed), tuple(closed[:SHOWN]))]


def repair(database: Database, settings: Settings, seen: AuditResult, retry: RetryPolicy) -> tuple[AuditFinding, ...]:
    """Repairs what is safe to repair; returns the findings with the number of rows repaired for each.

    Every row is locked and checked again first; rows that have changed since are left alone. Safe to run concurrently.

    Raises: DatabaseUnavailable: the rest was not repaired.
    """
    checks = {check.name: check for check in CHECKS}
    values = parameters(settings, recent_s=10 * 365 * 86400.0)
    return tuple(
        finding
        if finding.repair is None
        else replace(
            finding, repaired=_repair_one(database, checks[finding.name], seen.every[finding.name], values, retry)
        )
        for finding in seen.findings
    )


def _repair_one(
    database: Database, check: Invariant, ids: Sequence[str], values: Mapping[str, Any], retry: RetryPolicy
) -> int:
    with database.begin() as connection:
        still = _confirmed(connection, check, ids, values)
        if check.repair not in (Repair.EXIT, Repair.CANCEL, Repair.SETTLE):
            return _repair_rows(connection, check, still, retry) if still else 0
    if check.repair is Repair.CANCEL:
        tasks.cancel(database, [UUID(one) for one in still])
        return len(still)
    if check.repair is Repair.SETTLE:
        return graphs.look_again(database, [UUID(one) for one in still])
    return sum(instances.exited(database, UUID(one), None, f"audit: {check.means}", retry) for one in still)


_KEYS = {
    "leases": ("attempt_id", "uuid[]"),
    "gradings": ("attempt_id", "uuid[]"),
    "semaphore_holders": ("limit_name || ' ' || holder", "text[]"),
}
"""SQL expression for the ids of a table's rows, and the array type to look them up; default: `id`, a UUID."""


def _among(table: str) -> str:
    """Returns an SQL condition: the row's id is one of `:ids`."""
    key, array = _KEYS.get(table, ("id", "uuid[]"))
    return f"{key} = ANY(CAST(:ids AS {array}))"


def _confirmed(connection: Connection, check: Invariant, ids: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Returns the ids that still break the invariant, locked; rows that are locked already are skipped."""
    key = _KEYS.get(check.table, ("id", ""))[0]
    lock = f"SELECT ({key})::text FROM {check.table} WHERE {_among(check.table)} FOR UPDATE SKIP LOCKED"  # noqa: S608
    locked = list(sql(connection, lock, {"ids": list(ids)}).scalars())
    again = f"SELECT id::text FROM ({check.query}) found WHERE id::text = ANY(:ids)"  # noqa: S608
    return list(sql(connection, again, {**values, "ids": locked}).scalars())


def _repair_rows(connection: Connection, check: Invariant, ids: list[str], retry: RetryPolicy) -> int:
    match check.repair:
        case Repair.LOSE:
            failure = Failure(error="StaleWriter", message=f"taken back by the auditor: {check.means}")
            lost = [UUID(one) for one in ids]
            numbers = gradings.numbers(connection, lost)
            return len(ends.lose(connection, lost, failure, EndReason.LOST, retry, gradings=numbers))
        case Repair.PUT_BACK:
            failure = Failure(error="StaleWriter", message=f"put back by the auditor: {check.means}")
            gradings.lose(connection, [UUID(one) for one in ids], failure, retry)
            return len(ids)
        case Repair.FREE:
            if check.table == "semaphore_holders":
                limits.wake_waiters(connection, sorted({one.rpartition(" ")[0] for one in ids}))
            statement = f"DELETE FROM {check.table} WHERE {_among(check.table)}"  # noqa: S608
            return sql(connection, statement, {"ids": ids}).rowcount
        case Repair.CLOSE | Repair.NUMBER | Repair.REQUEUE | Repair.IN_LINE as repair:
            kind = "attempt.lost" if repair is Repair.CLOSE else "task.repaired"
            return _tell(connection, _STATEMENTS[repair], ids, check, kind)
        case _:
            return 0


_CLOSE = """
WITH closed AS (
    UPDATE attempts a SET state = 'lost', finished_at = clock_timestamp(), end_reason = 'lost',
        failure = jsonb_build_object('error', 'StaleWriter', 'message', CAST(:why AS text))
    FROM tasks t WHERE a.id = ANY(CAST(:ids AS uuid[])) AND a.state IN ('dispatched', 'running', 'grading')
        AND t.id = a.task_id
    RETURNING a.id AS attempt_id, a.task_id, t.run_id
), freed AS (DELETE FROM leases l USING closed c WHERE l.attempt_id = c.attempt_id
), graded AS (DELETE FROM gradings g USING closed c WHERE g.attempt_id = c.attempt_id)
SELECT run_id, task_id, attempt_id FROM closed"""

_NUMBER = """
UPDATE tasks t SET attempts = (SELECT max(a.number) FROM attempts a WHERE a.task_id = t.id)
WHERE t.id = ANY(CAST(:ids AS uuid[])) AND t.state IN ('pending', 'succeeded', 'failed', 'cancelled')
RETURNING t.run_id, t.id AS task_id, NULL::uuid AS attempt_id"""

# A task that was cancelled meanwhile ends. A task of a paused run waits like the run's other tasks.
_REQUEUE = """
UPDATE tasks t SET
    state = CASE WHEN t.cancel_requested_at IS NULL THEN 'pending' ELSE 'cancelled' END,
    end_reason = CASE WHEN t.cancel_requested_at IS NOT NULL THEN coalesce(t.cancel_reason, 'cancelled') END,
    finished_at = CASE WHEN t.cancel_requested_at IS NOT NULL THEN clock_timestamp() END,
    in_line = p.name IS NULL,
    available_at = CASE WHEN p.name IS NULL THEN clock_timestamp() ELSE CAST(:paused AS timestamptz) END
FROM tasks same LEFT JOIN pauses p ON p.kind = 'run' AND p.name = same.run_id::text
WHERE same.id = t.id AND t.id = ANY(CAST(:ids AS uuid[]))
RETURNING t.run_id, t.id AS task_id, NULL::uuid AS attempt_id"""

_IN_LINE = """
UPDATE tasks t SET in_line = true, available_at = least(t.available_at, clock_timestamp())
WHERE t.id = ANY(CAST(:ids AS uuid[])) RETURNING t.run_id, t.id AS task_id, NULL::uuid AS attempt_id"""


_STATEMENTS = {Repair.CLOSE: _CLOSE, Repair.NUMBER: _NUMBER, Repair.REQUEUE: _REQUEUE, Repair.IN_LINE: _IN_LINE}


def _tell(connection: Connection, statement: str, ids: list[str], check: Invariant, kind: str) -> int:
    rows = sql(connection, statement, {"ids": ids, "why": f"audit: {check.means}", "paused": PAUSED}).all()
    data = {"by": "auditor", "finding": check.name}
    events.append(connection, *(Fact(kind, row.run_id, row.task_id, row.attempt_id, data=data) for row in rows))
    if rows:
        ended = "SELECT id FROM tasks WHERE id = ANY(:ids) AND state = 'cancelled'"
        events.tell_outcome(connection, list(sql(connection, ended, {"ids": [row.task_id for row in rows]}).scalars()))
        events.wake_dispatcher(connection)
    return len(rows)
