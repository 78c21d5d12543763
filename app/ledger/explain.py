"""Explains a task: the duration of each phase, what it waits for, its limiting factors and what would help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import UnknownName
from app.ledger import graphs, limiting_factors, pauses
from app.ledger.database import Database, has_dispatcher, sql
from app.ledger.limiting_factors import LimitingFactor
from app.ledger.pressure import MODEL_LIMIT
from app.ledger.stories import (
    AttemptStory,
    CurrentState,
    LimitSpan,
    PhaseStep,
    QueuePosition,
    Share,
    TaskStory,
)
from app.ledger.timeline import LINE, NAMES, AttemptTimes, LimitIntervals, WaitingWindow, phase_of_limit, spans, windows
from app.ledger.waiting import RUN_LIMIT, QueueKey, policy_limit, run_limit
from app.models.outcome import Phase
from app.models.spec import Mode
from app.models.tables import PAUSED
from app.settings import Settings

BACKOFF = "backoff"
"""Name for the wait of a delayed retry; not a limit, but listed with the limits."""

_PAUSED_AT = datetime.fromisoformat(PAUSED)


def task(database: Database, settings: Settings, task_id: UUID) -> TaskStory:
    """Explains a task from its rows and from the limits that the dispatcher recorded. Raises: UnknownName."""
    with database.begin() as connection:
        row = connection.execute(_TASK, {"id": task_id}).first()
        if row is None:
            raise UnknownName(f"unknown task {task_id}")
        attempts = connection.execute(_ATTEMPTS, {"id": task_id}).all()
        tries = _attempt_stories(connection, row, attempts)
        now = None if row.finished_at else current_state(connection, settings, row, attempts, tries)
    return _story(row, tries, now)


_TASK = text("SELECT t.*, clock_timestamp() AS now FROM tasks t WHERE id = :id")
_ATTEMPTS = text(
    "SELECT a.*, i.provider, i.handle FROM attempts a LEFT JOIN instances i ON i.id = a.instance_id"
    " WHERE a.task_id = :id ORDER BY a.number"
)


def _story(row: Row[Any], tries: Sequence[AttemptStory], now: CurrentState | None) -> TaskStory:
    phases: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    for step in (step for one in tries for step in one.steps):
        phases[step.phase] += step.seconds
        for wait in step.waits:
            waits[wait.name] += wait.seconds
    names = ("run_id", "name", "user_name", "resource_class", "state", "end_reason", "accepted_at", "finished_at")
    return TaskStory(
        task_id=row.id,
        **{name: getattr(row, name) for name in names},
        mode=row.requested_mode,
        seconds=((row.finished_at or row.now) - row.accepted_at).total_seconds(),
        tries=tuple(tries),
        now=now,
        phases=tuple(Share(name, phases[name]) for name in NAMES if name in phases),
        waits=tuple(Share(*item) for item in sorted(waits.items(), key=lambda item: -item[1])),
    )


def queue_of_task(row: Row[Any]) -> QueueKey:
    """Returns the queue that a task (or an aggregate of tasks) waits in."""
    return QueueKey(Mode(row.requested_mode), row.resource_class, row.user_name)


def history(
    connection: Connection, queue: QueueKey, run_id: UUID, since: datetime, now: datetime
) -> dict[str, LimitIntervals]:
    """Returns for each limit the intervals when it kept this queue waiting, including the run's pauses."""
    rows = sql(
        connection,
        "SELECT limit_name, since, coalesce(until, :now) AS until FROM bindings"
        " WHERE (user_name = :user AND mode = :mode AND resource_class = :class"
        " AND (NOT starts_with(limit_name, :of_runs) OR limit_name IN (:of_run, :of_policy))"
        " AND (NOT starts_with(limit_name, :of_models) OR substr(limit_name, length(:of_models) + 1) IN"
        " (SELECT model FROM tasks WHERE run_id = :run))"
        " OR user_name = '*' AND limit_name = :pause) AND coalesce(until, :now) > :since",
        {
            "user": queue.user_name,
            "mode": queue.mode.value,
            "class": queue.resource_class,
            "pause": pauses.limit_name(run_id),
            "of_runs": RUN_LIMIT,
            "of_run": run_limit(run_id),
            "of_policy": policy_limit(run_id),
            "of_models": MODEL_LIMIT,
            "run": run_id,
            "since": since,
            "now": now,
        },
    )
    by_limit: dict[str, list[tuple[datetime, datetime]]] = defaultdict(list)
    for row in rows:
        by_limit[row.limit_name].append((row.since, row.until))
    return {limit: LimitIntervals(intervals) for limit, intervals in by_limit.items()}


def due_at(row: Row[Any], window: WaitingWindow) -> datetime | None:
    """Returns when the retry of a task's last window was due; None: a first attempt or a paused task."""
    return row.available_at if window.attempt > 1 and row.available_at < _PAUSED_AT else None


def waited(
    window: WaitingWindow, limits: Mapping[str, LimitIntervals], now: datetime, not_before: datetime | None
) -> list[Share]:
    """Splits a waiting window by cause, longest first. not_before: when a delayed retry was due, if known."""
    end = window.end or now
    begin, shares = window.begin, []
    # Resuming a run overwrites the time when its retries were due.
    resumed = any(limit.startswith("pause:run:") and bounds.within(begin, end) for limit, bounds in limits.items())
    if not_before is not None and not_before > begin and not resumed:
        shares.append(Share(BACKOFF, (min(end, not_before) - begin).total_seconds()))
        begin = min(end, not_before)
    shares += [Share(limit, bounds.within(begin, end)) for limit, bounds in limits.items()]
    return sorted((share for share in shares if share.seconds > 0), key=lambda share: -share.seconds)


def _attempt_stories(connection: Connection, row: Row[Any], attempts: Sequence[Row[Any]]) -> list[AttemptStory]:
    """Returns the attempts, and the next one without a row if the task waits or ended in its queue."""
    reopened = sql(
        connection, "SELECT at FROM events WHERE task_id = :id AND kind = 'task.reopened'", {"id": row.id}
    ).scalars()
    tried = [AttemptTimes(attempt.dispatched_at, attempt.finished_at) for attempt in attempts]
    waiting = {window.attempt: window for window in windows(row.accepted_at, row.finished_at, tried, reopened)}
    limits = history(connection, queue_of_task(row), row.run_id, row.accepted_at, row.now)
    last = max(waiting, default=0)
    stories = []
    for number in range(1, max(last, len(attempts)) + 1):
        steps = []
        if window := waiting.get(number):
            due = due_at(row, window) if number == last else None
            shares = waited(window, limits, row.now, due)
            during = tuple(
                LimitSpan(limit, *span)
                for limit, bounds in limits.items()
                for span in bounds.during(window.begin, window.end or row.now)
            )
            steps.append(PhaseStep(LINE, window.begin, window.end, window.seconds(row.now), tuple(shares), during))
        attempt = attempts[number - 1] if number <= len(attempts) else None
        if attempt is None:
            stories.append(
                AttemptStory(
                    number, "waiting" if not row.finished_at else row.state, "", None, None, None, tuple(steps)
                )
            )
        else:
            stories.append(_try(attempt, steps + _steps(attempt, row.now)))
    return stories


def _steps(attempt: Row[Any], now: datetime) -> list[PhaseStep]:
    reached = {Phase(name): datetime.fromisoformat(at) for name, at in attempt.phases.items() if at}
    waits: dict[str, list[Share]] = defaultdict(list)
    phases = spans(reached, attempt.dispatched_at, attempt.finished_at, now)
    last = phases[-1].phase if phases else ""
    for limit, seconds in attempt.waits.items():
        waits[phase_of_limit(limit) or last].append(Share(limit, float(seconds)))
    return [PhaseStep(o.phase, o.begin, o.end, o.seconds, tuple(waits[o.phase])) for o in phases]


def _try(attempt: Row[Any], steps: Sequence[PhaseStep]) -> AttemptStory:
    failure = attempt.failure or {}
    return AttemptStory(
        number=attempt.number,
        state=attempt.state,
        mode=attempt.mode,
        end_reason=attempt.end_reason,
        instance=f"{attempt.provider} {attempt.handle or '?'}" if attempt.provider else None,
        failure=f"{failure['error']}: {failure['message']}" if failure else None,
        steps=tuple(steps),
    )


NO_DISPATCHER = "no dispatcher decides: start one with `megaflow up` or `megaflow worker control`"


def current_state(
    connection: Connection,
    settings: Settings,
    row: Row[Any],
    attempts: Sequence[Row[Any]],
    tries: Sequence[AttemptStory],
) -> CurrentState:
    """Describes what an unfinished task waits for or does, in every state that is not an end. Raises nothing."""
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
    if row.waits:
        return CurrentState(comes_after(connection, row.run_id), since)
    state = limiting_factors.state(connection, settings)
    queue = queue_of_task(row)
    if row.run_id in state.paused:
        bounds = state.factors(queue, row.run_id)
        paused_at = next((one.since for one in bounds if one.since is not None), None)
        return CurrentState("its run is paused", max(since, paused_at or since), tuple(bounds))
    if not row.in_line and row.available_at >= _PAUSED_AT:
        return CurrentState("put off by a pause that is over: back in line with the next pass", since)
    if row.available_at > row.now:
        after = f" after attempt {attempts[-1].number} ended as {attempts[-1].end_reason}" if attempts else ""
        return CurrentState(f"delayed until {row.available_at:%H:%M:%S} UTC{after}", since)
    place = _place(connection, row)
    bounds = state.factors(queue, row.run_id, place.length, [row.model])
    if not bounds and not has_dispatcher(connection):
        return CurrentState(NO_DISPATCHER, since, (), place)
    waits = "waits for its turn" if not bounds else "waits for " + " and ".join(bound.limit for bound in bounds)
    return CurrentState(waits, since, tuple(bounds), place)


def comes_after(connection: Connection, run_id: UUID) -> str:
    """Describes the upstream tasks that the waiting tasks of a run depend on."""
    upstream = graphs.waits_for(connection, run_id)
    if upstream is None:
        return "is put in line with the next pass: the tasks that it comes after have succeeded"
    others = f", and {upstream.tasks - 1} more" if upstream.tasks > 1 else ""
    return f"waits for task {upstream.name} ({upstream.task_id}), which is {upstream.state}{others}"


_BEFORE = text("""
SELECT count(*) AS length, count(*) FILTER (WHERE priority > :priority OR priority = :priority AND (
    (attempts > 0) > :again OR (attempts > 0) = :again AND (
    run_id < :run OR run_id = :run AND (group_started AND NOT :started OR group_started = :started AND id < :id))
)) AS before
FROM tasks WHERE state = 'pending' AND in_line AND requested_mode = :mode AND resource_class = :class
    AND user_name = :user
""")


def _place(connection: Connection, row: Row[Any]) -> QueuePosition:
    """Returns a task's position in its queue, in the order of the queue's index: see `app.ledger.waiting.heads`."""
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
    return QueuePosition(own.before + 1, own.length)


_COMING = text("""
SELECT count(*) FILTER (WHERE state = 'requested') AS requested, count(*) FILTER (WHERE state = 'booting') AS booting,
    count(*) FILTER (WHERE state = 'ready') AS ready,
    coalesce(sum(slots) FILTER (WHERE state = 'ready'), 0)::int AS slots,
    extract(epoch FROM clock_timestamp() - min(requested_at) FILTER (WHERE state IN ('requested', 'booting')))::float8
        AS oldest_s
FROM instances WHERE mode = :mode AND resource_class = :class AND state NOT IN ('terminated', 'failed')
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
    if coming.oldest_s is not None:
        doing += f"; the oldest was asked for {coming.oldest_s:.1f} s ago"
    return CurrentState(f"{doing}; {message}", since)


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
            why=f"held by {hold.held_by}" if hold.held_by else "free: granted at the next look",
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
