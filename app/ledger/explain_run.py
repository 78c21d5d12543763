"""Explains a run: where its time went, what limits its remaining tasks, and what would help."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import UnknownName
from app.ledger import explain, limiting_factors
from app.ledger.database import Database, has_dispatcher, sql
from app.ledger.stories import QueueNow, RunStory, Share, SlowTask, Spread
from app.ledger.timeline import LINE, NAMES, AttemptTimes, WaitingWindow, spans, windows
from app.ledger.waiting import QueueKey
from app.models.outcome import Phase
from app.models.states import LIVE_ATTEMPT
from app.settings import Settings

_SLOWEST = 5


def run(database: Database, settings: Settings, run_id: UUID) -> RunStory:
    """Returns the phases' spread, seconds by limit, slowest tasks, retries, limiting factors. Raises: UnknownName."""
    with database.begin() as connection:
        row = connection.execute(_RUN, {"id": run_id}).first()
        if row is None:
            raise UnknownName(f"unknown run {run_id}; `megaflow runs` lists them")
        times = _Times(connection, row)
        states = sql(
            connection,
            "SELECT state, count(*) AS tasks FROM tasks WHERE run_id = :id GROUP BY state ORDER BY state",
            {"id": run_id},
        )
        lines, delayed, hint = _lines(connection, settings, row)
        return RunStory(
            run_id=run_id,
            name=row.name,
            user_name=row.user_name,
            total=row.total,
            states={one.state: one.tasks for one in states},
            delayed=delayed,
            phases=times.spreads(),
            waits=times.waits(connection),
            slowest=times.slowest(),
            retries=_retries(connection, run_id),
            now=lines,
            hint=hint,
            comes_after=explain.comes_after(connection, row.id) if _waits(connection, row.id) else "",
        )


_RUN = text("SELECT id, name, user_name, total, clock_timestamp() AS now FROM runs WHERE id = :id")


class _Times:
    """Waiting windows and phase spans of all tasks of a run, read with three queries."""

    def __init__(self, connection: Connection, run_row: Row[Any]) -> None:
        self._run, self._now = run_row, run_row.now
        self._seconds: dict[str, list[float]] = defaultdict(list)  # by phase
        self._windows: dict[QueueKey, list[tuple[WaitingWindow, datetime | None]]] = defaultdict(list)
        self._tasks: list[tuple[float, Row[Any], dict[str, float]]] = []
        ids = {"id": run_row.id}
        tries: dict[UUID, list[Row[Any]]] = defaultdict(list)
        for attempt in connection.execute(_ATTEMPTS, ids):
            tries[attempt.task_id].append(attempt)
        reopened: dict[UUID, list[datetime]] = defaultdict(list)
        for event in connection.execute(_REOPENED, ids):
            reopened[event.task_id].append(event.at)
        for row in connection.execute(_TASKS, ids):
            self._add(row, tries[row.id], reopened[row.id])

    def _add(self, row: Row[Any], attempts: Sequence[Row[Any]], reopened: Iterable[datetime]) -> None:
        own: dict[str, float] = defaultdict(float)
        tried = [AttemptTimes(attempt.dispatched_at, attempt.finished_at) for attempt in attempts]
        task_windows = windows(row.accepted_at, row.finished_at, tried, reopened)
        for window in task_windows:
            due = explain.due_at(row, window) if window is task_windows[-1] else None
            self._windows[explain.queue_of_task(row)].append((window, due))
            self._note(own, LINE, window.seconds(self._now), over=window.end is not None)
        for attempt in attempts:
            reached = {Phase(name): datetime.fromisoformat(at) for name, at in attempt.phases.items() if at}
            for span in spans(reached, attempt.dispatched_at, attempt.finished_at, self._now):
                self._note(own, span.phase, span.seconds, over=span.end is not None)
        seconds = ((row.finished_at or self._now) - row.accepted_at).total_seconds()
        self._tasks.append((seconds, row, own))

    def _note(self, own: dict[str, float], phase: str, seconds: float, *, over: bool) -> None:
        own[phase] += seconds
        if over:  # unfinished phases would pull the spread down
            self._seconds[phase].append(seconds)

    def spreads(self) -> tuple[Spread, ...]:
        return tuple(spread(phase, self._seconds[phase]) for phase in NAMES if self._seconds[phase])

    def slowest(self) -> tuple[SlowTask, ...]:
        ranked = sorted(self._tasks, key=lambda item: -item[0])[:_SLOWEST]
        return tuple(
            SlowTask(row.id, row.name, row.state, seconds, max(own, key=lambda phase: own[phase], default=""))
            for seconds, row, own in ranked
        )

    def waits(self, connection: Connection) -> tuple[Share, ...]:
        """Returns the seconds that all tasks waited, by limit: in their queues and within their attempts."""
        seconds: dict[str, float] = defaultdict(float)
        for queue, waited in self._windows.items():
            since = min(window.begin for window, _ in waited)
            limits = explain.history(connection, queue, self._run.id, since, self._now)
            for window, due in waited:
                for share in explain.waited(window, limits, self._now, due):
                    seconds[share.name] += share.seconds
        for row in connection.execute(_WAITS, {"id": self._run.id}):
            seconds[row.limit_name] += row.seconds
        return tuple(Share(*item) for item in sorted(seconds.items(), key=lambda item: (-item[1], item[0])))


_TASKS = text(
    "SELECT id, name, user_name, requested_mode, resource_class, state, accepted_at, finished_at, available_at"
    " FROM tasks WHERE run_id = :id"
)
_ATTEMPTS = text(
    "SELECT a.task_id, a.dispatched_at, a.finished_at, a.phases FROM tasks t JOIN attempts a ON a.task_id = t.id"
    " WHERE t.run_id = :id ORDER BY a.task_id, a.number"
)
_REOPENED = text(
    "SELECT e.task_id, e.at FROM tasks t JOIN events e ON e.task_id = t.id AND e.kind = 'task.reopened'"
    " WHERE t.run_id = :id AND t.attempts > 0"
)
_WAITS = text(
    "SELECT w.key AS limit_name, sum(w.value::float8) AS seconds FROM tasks t JOIN attempts a ON a.task_id = t.id"
    " CROSS JOIN LATERAL jsonb_each_text(a.waits) w WHERE t.run_id = :id GROUP BY 1"
)


def spread(phase: str, seconds: Sequence[float]) -> Spread:
    """Returns the nearest-rank percentiles of at least one value."""
    ordered = sorted(seconds)
    p50, p90 = (ordered[math.ceil(len(ordered) * share) - 1] for share in (0.5, 0.9))
    return Spread(phase, len(ordered), p50, p90, ordered[-1], sum(ordered))


def _retries(connection: Connection, run_id: UUID) -> tuple[tuple[str, int], ...]:
    """Counts attempts that were not scored, by end reason; without those cancelled."""
    rows = sql(
        connection,
        "SELECT coalesce(a.end_reason, a.state) AS reason, count(*) AS attempts FROM tasks t"
        " JOIN attempts a ON a.task_id = t.id WHERE t.run_id = :id AND a.state <> ALL(:fine)"
        " GROUP BY 1 ORDER BY 2 DESC, 1",
        {"id": run_id, "fine": [*LIVE_ATTEMPT, "finished", "cancelled"]},
    )
    return tuple((row.reason, row.attempts) for row in rows)


def _waits(connection: Connection, run_id: UUID) -> bool:
    waiting = "SELECT EXISTS (SELECT FROM tasks WHERE run_id = :id AND state = 'pending' AND waits)"
    return bool(sql(connection, waiting, {"id": run_id}).scalar())


def _lines(connection: Connection, settings: Settings, run_row: Row[Any]) -> tuple[tuple[QueueNow, ...], int, str]:
    """Returns the limiting factors of each queue of the run's waiting tasks, the count of delayed tasks, and a hint."""
    state = limiting_factors.state(connection, settings)
    rows = sql(
        connection,
        "SELECT user_name, requested_mode, resource_class,"
        " count(*) FILTER (WHERE NOT waits AND (in_line OR available_at <= :now OR :paused)) AS waiting,"
        " count(*) FILTER (WHERE NOT waits AND NOT in_line AND available_at > :now AND NOT :paused) AS delayed,"
        " array_agg(DISTINCT model) AS models"
        " FROM tasks WHERE run_id = :id AND state = 'pending' GROUP BY 1, 2, 3 ORDER BY 4 DESC",
        {"id": run_row.id, "now": run_row.now, "paused": run_row.id in state.paused},
    ).all()
    queues = []
    for row in rows:
        queue = explain.queue_of_task(row)
        if row.waiting:
            queues.append(
                QueueNow(queue, row.waiting, tuple(state.factors(queue, run_row.id, row.waiting, row.models)))
            )
    free = any(not queue.bounds for queue in queues)
    hint = explain.NO_DISPATCHER if free and not has_dispatcher(connection) else ""
    return tuple(queues), sum(row.delayed for row in rows), hint
