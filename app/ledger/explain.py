"""Why a task is where it is: what every phase took, what it waited for, what binds now and what would help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import UnknownName
from app.ledger import explain_now, pauses
from app.ledger.database import Database, sql
from app.ledger.stories import AttemptStory, CurrentState, PhaseStep, Share, TaskStory
from app.ledger.timeline import (
    LINE,
    NAMES,
    AttemptTimes,
    LimitIntervals,
    Span,
    WaitingWindow,
    phase_of_limit,
    spans,
    windows,
)
from app.ledger.waiting import RUN_LIMIT, QueueKey, run_limit
from app.models.outcome import Phase
from app.models.spec import Mode
from app.models.tables import PAUSED
from app.settings import Settings

BACKOFF = "backoff"
"""What a delayed retry waits for; not a limit, but named beside them."""

_PAUSED_AT = datetime.fromisoformat(PAUSED)


def task(database: Database, settings: Settings, task_id: UUID) -> TaskStory:
    """Live from the rows, with what the dispatcher noted of the past. Raises: UnknownName."""
    with database.begin() as connection:
        row = connection.execute(_TASK, {"id": task_id}).first()
        if row is None:
            raise UnknownName(f"unknown task {task_id}")
        attempts = connection.execute(_ATTEMPTS, {"id": task_id}).all()
        tries = _tries(connection, row, attempts)
        now = None if row.finished_at else explain_now.now(connection, settings, row, attempts, tries)
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


# --- What was -------------------------------------------------------------------------------------------------------


def line_of(row: Row[Any]) -> QueueKey:
    """The line that a task (or an aggregate of tasks) stands in."""
    return QueueKey(Mode(row.requested_mode), row.resource_class, row.user_name)


def history(
    connection: Connection, line: QueueKey, run_id: UUID, since: datetime, now: datetime
) -> dict[str, LimitIntervals]:
    """By limit, when it bound this line; the pauses of its user, class and run among them."""
    named = [
        pauses.limit_name("run", str(run_id)),
        pauses.limit_name("user", line.user_name),
        pauses.limit_name("class", line.resource_class),
    ]
    rows = sql(
        connection,
        "SELECT limit_name, since, coalesce(until, :now) AS until FROM bindings"
        " WHERE (user_name = :user AND mode = :mode AND resource_class = :class"
        " AND (NOT starts_with(limit_name, :of_runs) OR limit_name = :of_run)"
        " OR user_name = '*' AND limit_name = ANY(:named)) AND coalesce(until, :now) > :since",
        {
            "user": line.user_name,
            "mode": line.mode.value,
            "class": line.resource_class,
            "named": named,
            "of_runs": RUN_LIMIT,
            "of_run": run_limit(run_id),
            "since": since,
            "now": now,
        },
    )
    found: dict[str, list[tuple[datetime, datetime]]] = defaultdict(list)
    for row in rows:
        found[row.limit_name].append((row.since, row.until))
    return {limit: LimitIntervals(intervals) for limit, intervals in found.items()}


def due_at(row: Row[Any], window: WaitingWindow) -> datetime | None:
    """When the retry that a task's last window was for was due; None for a first attempt, or what is paused."""
    return row.available_at if window.attempt > 1 and row.available_at < _PAUSED_AT else None


def waited(
    window: WaitingWindow, limits: Mapping[str, LimitIntervals], now: datetime, not_before: datetime | None
) -> list[Share]:
    """What a window was spent on, longest first. not_before: when a delayed retry was due, where that is known."""
    end = window.end or now
    begin, shares = window.begin, []
    # Who resumes a run writes over when its retries were due.
    resumed = any(limit.startswith("pause:run:") and bounds.within(begin, end) for limit, bounds in limits.items())
    if not_before is not None and not_before > begin and not resumed:
        shares.append(Share(BACKOFF, (min(end, not_before) - begin).total_seconds()))
        begin = min(end, not_before)
    shares += [Share(limit, bounds.within(begin, end)) for limit, bounds in limits.items()]
    return sorted((share for share in shares if share.seconds > 0), key=lambda share: -share.seconds)


def _tries(connection: Connection, row: Row[Any], attempts: Sequence[Row[Any]]) -> list[AttemptStory]:
    """The attempts, and one more that has no row yet when the task waits or has ended in line."""
    reopened = sql(
        connection, "SELECT at FROM events WHERE task_id = :id AND kind = 'task.reopened'", {"id": row.id}
    ).scalars()
    tried = [AttemptTimes(attempt.dispatched_at, attempt.finished_at) for attempt in attempts]
    waiting = {window.attempt: window for window in windows(row.accepted_at, row.finished_at, tried, reopened)}
    limits = history(connection, line_of(row), row.run_id, row.accepted_at, row.now)
    last = max(waiting, default=0)
    found = []
    for number in range(1, max(last, len(attempts)) + 1):
        steps = []
        if window := waiting.get(number):
            due = due_at(row, window) if number == last else None
            shares = waited(window, limits, row.now, due)
            steps.append(PhaseStep(LINE, window.begin, window.end, window.seconds(row.now), tuple(shares)))
        attempt = attempts[number - 1] if number <= len(attempts) else None
        if attempt is None:
            found.append(
                AttemptStory(
                    number, "waiting" if not row.finished_at else row.state, "", None, None, None, tuple(steps)
                )
            )
        else:
            found.append(_try(attempt, steps + _steps(attempt, row.now)))
    return found


def _steps(attempt: Row[Any], now: datetime) -> list[PhaseStep]:
    reached = {Phase(name): datetime.fromisoformat(at) for name, at in attempt.phases.items() if at}
    waits: dict[str, list[Share]] = defaultdict(list)
    found = spans(reached, attempt.dispatched_at, attempt.finished_at, now)
    last = found[-1].phase if found else ""
    for limit, seconds in attempt.waits.items():
        waits[phase_of_limit(limit) or last].append(Share(limit, float(seconds)))
    return [_step(span, waits[span.phase]) for span in found]


def _step(span: Span, waits: Sequence[Share]) -> PhaseStep:
    return PhaseStep(span.phase, span.begin, span.end, span.seconds, tuple(waits))


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
