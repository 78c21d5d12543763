"""Reads recorded runs as workloads: each task's durations by phase, from the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from app.errors import SpecInvalid
from app.ledger.database import Database
from app.models.outcome import Phase
from app.models.spec import Mode
from app.simulation.virtual import VirtualTask

_ATTEMPTS = """
SELECT t.id AS task_id, t.user_name, t.priority, t.run_id, t.accepted_at, t.requested_mode, t.finished_at AS task_ended,
    a.mode, a.dispatched_at, a.claimed_at, a.finished_at, a.phases
FROM tasks t JOIN attempts a ON a.task_id = t.id
WHERE t.run_id = ANY(:runs) AND a.claimed_at IS NOT NULL AND a.finished_at IS NOT NULL ORDER BY t.id, a.number
"""


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded runs. `peak`: attempts at once; `start_s`: from an attempt's admission to its claim."""

    tasks: Sequence[VirtualTask]
    makespan_s: float
    peak: dict[Mode, int]
    start_s: dict[Mode, float]


def read(database: Database, runs: Sequence[UUID]) -> Trace:
    """Reads the runs. Raises: SpecInvalid: they have no task that ran to its end; DatabaseUnavailable."""
    rows = database.sql(_ATTEMPTS, {"runs": list(runs)}).all()
    if not rows:
        raise SpecInvalid("expected a run with attempts that have ended; found none to go by")
    first = min(row.accepted_at for row in rows)
    numbers = {run_id: number for number, run_id in enumerate(sorted({row.run_id for row in rows}))}
    environment_s = _medians(rows, _environment_s)
    attempts: defaultdict[UUID, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        attempts[row.task_id].append(row)
    tasks = [
        VirtualTask(
            arrival_s=(held[0].accepted_at - first).total_seconds(),
            held_s=_held_s(held, environment_s),
            mode=Mode(held[0].requested_mode),
            user=held[0].user_name,
            run=numbers[held[0].run_id],
            priority=held[0].priority,
        )
        for held in attempts.values()
    ]
    ended = max(row.task_ended or row.finished_at for row in rows)
    return Trace(tasks, (ended - first).total_seconds(), _peaks(rows), _medians(rows, _start_s))


def _held_s(attempts: Sequence[Row[Any]], environment_s: dict[Mode, float]) -> dict[Mode, float]:
    """Returns slot seconds by mode: measured in its own mode, corrected by the other mode's usual environment time."""
    mode = Mode(attempts[-1].mode)
    held_s = sum((_freed(row) - row.claimed_at).total_seconds() for row in attempts)
    held_by_mode = {}
    for one in (Mode.EPHEMERAL, Mode.PERSISTENT):
        other_s = environment_s[one] - environment_s[mode] if {one, mode} <= environment_s.keys() else 0.0
        held_by_mode[one] = held_s if one is mode else max(0.001, held_s + other_s)
    return held_by_mode


def _freed(row: Row[Any]) -> datetime:
    """Returns the time at which its slot was free again: for the pool, after the teardown."""
    finished: datetime = row.finished_at
    torn_down = row.phases.get(Phase.TORN_DOWN)
    if torn_down is None or Mode(row.mode) is Mode.EPHEMERAL:
        return finished
    return max(finished, datetime.fromisoformat(torn_down))


def _environment_s(row: Row[Any]) -> float | None:
    ready = row.phases.get(Phase.ENVIRONMENT_READY)
    return None if ready is None else (datetime.fromisoformat(ready) - row.claimed_at).total_seconds()


def _start_s(row: Row[Any]) -> float | None:
    return float((row.claimed_at - row.dispatched_at).total_seconds())


def _medians(rows: Sequence[Row[Any]], value: Any) -> dict[Mode, float]:
    values_by_mode: defaultdict[Mode, list[float]] = defaultdict(list)
    for row in rows:
        if (seconds := value(row)) is not None:
            values_by_mode[Mode(row.mode)].append(seconds)
    return {mode: median(values) for mode, values in values_by_mode.items()}


def _peaks(rows: Sequence[Row[Any]]) -> dict[Mode, int]:
    peaks: dict[Mode, int] = {}
    for mode in {Mode(row.mode) for row in rows}:
        steps = sorted(
            step for row in rows if Mode(row.mode) is mode for step in ((row.dispatched_at, 1), (row.finished_at, -1))
        )
        running = most = 0
        for _, step in steps:
            running += step
            most = max(most, running)
        peaks[mode] = most
    return peaks
