"""What a task that has not ended does or waits for at this moment."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, text

from app.ledger import limiting_factors
from app.ledger.database import has_dispatcher, sql
from app.ledger.limiting_factors import LimitingFactor, SchedulerState
from app.ledger.stories import AttemptStory, CurrentState, OtherUser, PhaseStep, QueuePosition
from app.ledger.waiting import QueueKey
from app.models.kinds import PauseKind
from app.models.spec import Mode
from app.models.tables import PAUSED
from app.settings import Settings

NO_DISPATCHER = "no dispatcher decides: start one with `megaflow up` or `megaflow worker control`"

_PAUSED_AT = datetime.fromisoformat(PAUSED)


def now(
    connection: Connection,
    settings: Settings,
    row: Row[Any],
    attempts: Sequence[Row[Any]],
    tries: Sequence[AttemptStory],
) -> CurrentState:
    """Raises nothing: an answer for every state that is not an end."""
    since = tries[-1].steps[-1].begin if tries and tries[-1].steps else row.accepted_at
    match row.state:
        case "pending":
            return _in_line(connection, settings, row, attempts, since)
        case "admitted":
            return _unclaimed(connection, attempts[-1], since)
        case _:
            return _underway(connection, row, attempts[-1], tries[-1].steps[-1])


def _in_line(
    connection: Connection, settings: Settings, row: Row[Any], attempts: Sequence[Row[Any]], since: datetime
) -> CurrentState:
    state = limiting_factors.state(connection, settings)
    line = QueueKey(Mode(row.requested_mode), row.resource_class, row.user_name)
    if (PauseKind.RUN, str(row.run_id)) in state.paused:
        return CurrentState("its run is paused", since, tuple(state.factors(line, row.run_id)))
    if not row.in_line and row.available_at >= _PAUSED_AT:
        return CurrentState("put off by a pause that is over: back in line with the next pass", since)
    if row.available_at > row.now:
        after = f" after attempt {attempts[-1].number} ended as {attempts[-1].end_reason}" if attempts else ""
        return CurrentState(f"delayed until {row.available_at:%H:%M:%S} UTC{after}", since)
    place = _place(connection, row, state)
    bounds = state.factors(line, row.run_id, place.length)
    if not bounds and not has_dispatcher(connection):
        return CurrentState(NO_DISPATCHER, since, (), place)
    waits = "waits for its turn" if not bounds else "waits for " + " and ".join(bound.limit for bound in bounds)
    return CurrentState(waits, since, tuple(bounds), place)


# --- In line --------------------------------------------------------------------------------------------------------

_BEFORE = text("""
SELECT count(*) AS length, count(*) FILTER (WHERE priority > :priority OR priority = :priority AND (
    (attempts > 0) > :again OR (attempts > 0) = :again AND (
    run_id < :run OR run_id = :run AND (group_started AND NOT :started OR group_started = :started AND id < :id))
)) AS before
FROM tasks WHERE state = 'pending' AND in_line AND requested_mode = :mode AND resource_class = :class
    AND user_name = :user
""")


def _place(connection: Connection, row: Row[Any], state: SchedulerState) -> QueuePosition:
    """The order of a line is that of its index: see `app.ledger.waiting.heads`."""
    own = connection.execute(
        _BEFORE,
        {
            "priority": row.priority,
            "run": row.run_id,
            "again": row.attempts > 0,
            "started": row.group_started,
            "id": row.id,
            "mode": row.requested_mode,
            "class": row.resource_class,
            "user": row.user_name,
        },
    ).one()
    beside = sql(
        connection,
        "SELECT user_name, count(*) AS waiting FROM tasks WHERE state = 'pending' AND in_line"
        " AND requested_mode = :mode AND resource_class = :class AND user_name <> :user"
        " GROUP BY user_name ORDER BY waiting DESC, user_name",
        {"mode": row.requested_mode, "class": row.resource_class, "user": row.user_name},
    )
    others = tuple(OtherUser(other.user_name, other.waiting, state.users[other.user_name]) for other in beside)
    return QueuePosition(own.before + 1, own.length, others)


# --- Admitted -------------------------------------------------------------------------------------------------------

_COMING = text("""
SELECT count(*) FILTER (WHERE state = 'requested') AS requested, count(*) FILTER (WHERE state = 'booting') AS booting,
    count(*) FILTER (WHERE state = 'ready') AS ready,
    coalesce(sum(slots) FILTER (WHERE state = 'ready'), 0)::int AS slots,
    extract(epoch FROM clock_timestamp() - min(requested_at) FILTER (WHERE state IN ('requested', 'booting')))::float8
        AS oldest_s
FROM instances WHERE mode = :mode AND resource_class = :class AND state NOT IN ('terminated', 'failed')
""")
_BOOT = text("""
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM ready_at - requested_at)) FROM (
    SELECT ready_at, requested_at FROM instances WHERE mode = :mode AND resource_class = :class AND ready_at IS NOT NULL
    ORDER BY id DESC LIMIT 20) lately
""")


def _unclaimed(connection: Connection, attempt: Row[Any], since: datetime) -> CurrentState:
    key = {"mode": attempt.mode, "class": attempt.resource_class}
    coming = connection.execute(_COMING, key).one()
    message = "its message is not in the broker yet"
    if attempt.published_at is not None:
        message = f"its message was published at {attempt.published_at:%H:%M:%S} UTC"
    if attempt.mode == Mode.PERSISTENT:
        used = sql(
            connection,
            "SELECT count(*) FROM attempts WHERE mode = :mode AND resource_class = :class AND state = 'running'",
            key,
        ).scalar_one()
        doing = f"waits for a free worker: {used} of {coming.slots} slots on {coming.ready} ready instance(s) in use"
        return CurrentState(f"{doing}; {message}", since)
    doing = f"waits for an instance: {coming.requested} requested, {coming.booting} booting, {coming.ready} ready"
    usual = connection.execute(_BOOT, key).scalar()
    if coming.oldest_s is not None:
        doing += f"; the oldest was asked for {coming.oldest_s:.1f} s ago"
    if usual is not None:
        doing += f"; they usually take {usual:.1f} s"
    return CurrentState(f"{doing}; {message}", since)


# --- Running --------------------------------------------------------------------------------------------------------

_HOLDS = text("""
SELECT mine.limit_name, mine.asked_at, l.capacity,
    (SELECT count(*) FROM semaphore_holders h WHERE h.limit_name = mine.limit_name AND h.granted_at IS NOT NULL
        AND h.expires_at > clock_timestamp()) AS used,
    (SELECT string_agg(who, ', ') FROM (
        SELECT coalesce('task ' || right(a.task_id::text, 12), 'holder ' || right(h.holder::text, 12)) AS who
        FROM semaphore_holders h LEFT JOIN attempts a ON a.id = h.attempt_id
        WHERE h.limit_name = mine.limit_name AND h.granted_at IS NOT NULL AND h.expires_at > clock_timestamp()
        ORDER BY h.granted_at LIMIT 5) oldest) AS held_by
FROM semaphore_holders mine LEFT JOIN limits l ON l.name = mine.limit_name
WHERE mine.attempt_id = :id AND mine.granted_at IS NULL ORDER BY mine.asked_at
""")


def _underway(connection: Connection, row: Row[Any], attempt: Row[Any], step: PhaseStep) -> CurrentState:
    bounds = tuple(
        LimitingFactor(
            hold.limit_name,
            hold.used,
            hold.capacity,
            f"megaflow limits set {hold.limit_name} {int(max(hold.used, hold.capacity or 0)) * 2 or 1}",
            why=f"held by {hold.held_by}" if hold.held_by else "nobody holds it: granted at the next look",
            since=hold.asked_at,
        )
        for hold in connection.execute(_HOLDS, {"id": attempt.id})
    )
    doing = f"{step.phase}, for {step.seconds:.1f} s" if step.end is None else "its end is being recorded"
    if bounds:
        doing += ", waits for " + " and ".join(bound.limit for bound in bounds)
    if row.cancel_requested_at is not None:
        doing += f"; told to stop at {row.cancel_requested_at:%H:%M:%S} UTC ({row.cancel_reason or 'cancelled'})"
    return CurrentState(doing, step.begin, bounds)
