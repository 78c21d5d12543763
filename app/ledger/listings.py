"""Reads what the web pages list: the tasks of a run by outcome, what waits in all queues, what the fleet costs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.ledger import limiting_factors
from app.ledger.database import Database, sql
from app.ledger.explain import queue_of_task
from app.ledger.stories import QueueNow
from app.settings import Settings

OUTCOMES = {
    "solved": "s",
    "unsolved": "u",
    "suspect": "x",
    "lost": "l",
    "running": "r",
    "waiting": "w",
    "cancelled": "c",
    "superseded": "p",
}
"""What a task came to, with the letter of each in `outcome_letters`."""

_OUTCOME = """CASE
    WHEN state = 'pending' THEN 'waiting'
    WHEN state IN ('admitted', 'running') THEN 'running'
    WHEN end_reason = 'superseded' THEN 'superseded'
    WHEN state = 'cancelled' THEN 'cancelled'
    WHEN verdict->>'suspect' <> '' THEN 'suspect'
    WHEN NOT coalesce((verdict->>'counts')::bool, false) THEN 'lost'
    WHEN (verdict->>'reward')::float8 >= 1 THEN 'solved'
    ELSE 'unsolved' END"""


@dataclass(frozen=True, slots=True)
class TaskLine:
    """One task of a run, as a table shows it."""

    id: UUID
    name: str
    replica: int
    agent: str
    model: str | None
    state: str
    outcome: str
    end_reason: str | None
    reward: float | None
    scripted: bool
    attempts: int
    seconds: float  # from its acceptance to its end, or until now
    detail: str  # of its verdict or its failure


_LINES = text(f"""
SELECT id, name, replica, agent, model, state, outcome, end_reason, reward, scripted, attempts, seconds, detail FROM (
    SELECT id, name, replica, agent, model, state, end_reason, scripted, attempts, {_OUTCOME} AS outcome,
        (verdict->>'reward')::float8 AS reward,
        extract(epoch FROM coalesce(finished_at, clock_timestamp()) - accepted_at)::float8 AS seconds,
        left(coalesce(failure->>'message', verdict->>'detail', ''), 300) AS detail
    FROM tasks WHERE run_id = :run AND (CAST(:after AS uuid) IS NULL OR id > :after)
        AND (:agent = '' OR agent = :agent) AND (:name = '' OR strpos(name, :name) > 0)) of_run
WHERE :outcome = '' OR outcome = :outcome ORDER BY id LIMIT :limit
""")  # noqa: S608


def task_lines(
    database: Database,
    run_id: UUID,
    *,
    outcome: str = "",
    agent: str = "",
    name: str = "",
    after: UUID | None = None,
    limit: int = 100,
) -> list[TaskLine]:
    """Tasks of a run in the order of their acceptance. name: a part of it; empty conditions leave nothing out."""
    values = {"run": run_id, "outcome": outcome, "agent": agent, "name": name, "after": after, "limit": limit}
    with database.begin() as connection:
        return [TaskLine(**row._asdict()) for row in connection.execute(_LINES, values)]


def outcome_letters(database: Database, run_id: UUID) -> str:
    """A letter of `OUTCOMES` for each task of a run, in the order of their acceptance."""
    letters = " ".join(f"WHEN '{name}' THEN '{letter}'" for name, letter in OUTCOMES.items())
    statement = f"""
        SELECT coalesce(string_agg(CASE outcome {letters} END, '' ORDER BY id), '')
        FROM (SELECT id, {_OUTCOME} AS outcome FROM tasks WHERE run_id = :run) of_run"""  # noqa: S608
    with database.begin() as connection:
        return str(sql(connection, statement, {"run": run_id}).scalar_one())


def task_at(database: Database, run_id: UUID, index: int) -> UUID | None:
    """The task at a place of that order, 0 the first."""
    statement = "SELECT id FROM tasks WHERE run_id = :run ORDER BY id OFFSET :index LIMIT 1"
    with database.begin() as connection:
        return sql(connection, statement, {"run": run_id, "index": index}).scalar()


def replicas_of(database: Database, task_id: UUID) -> list[TaskLine]:
    """The tasks of a task's group, itself among them."""
    statement = text(_LINES.text.replace("run_id = :run", "group_id = (SELECT group_id FROM tasks WHERE id = :task)"))
    values = {"task": task_id, "outcome": "", "agent": "", "name": "", "after": None, "limit": 1000}
    with database.begin() as connection:
        return [TaskLine(**row._asdict()) for row in connection.execute(statement, values)]


# --- The fleet ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaitingQueue:
    """A queue with what keeps it waiting. `oldest`: when its longest-waiting task was accepted."""

    now: QueueNow
    oldest: datetime
    run_id: UUID  # of that task


@dataclass(frozen=True, slots=True)
class LastHour:
    """What ended within the last hour. `lost`: attempts that infrastructure ended."""

    ended: int
    lost: int
    cost_usd: float | None  # of models; None: of no attempt is it known

    @property
    def loss(self) -> float | None:
        """The share of attempts that were lost."""
        return self.lost / self.ended if self.ended else None


_QUEUES = text("""
SELECT user_name, requested_mode, resource_class, count(*) AS waiting, min(accepted_at) AS oldest,
    (array_agg(run_id ORDER BY accepted_at))[1] AS run_id, array_agg(DISTINCT model) AS models
FROM tasks WHERE state = 'pending' AND (:user = '' OR user_name = :user)
GROUP BY 1, 2, 3 ORDER BY waiting DESC LIMIT 50
""")
_DAY_S = 86_400
_HOUR = text("""
SELECT count(*) AS ended, count(*) FILTER (WHERE state IN ('lost', 'error')) AS lost, sum(cost_usd) AS cost_usd
FROM attempts WHERE id > :since AND finished_at > clock_timestamp() - interval '1 hour'
    AND (:user = '' OR user_name = :user)
""")


def waiting_queues(database: Database, settings: Settings, user_name: str = "") -> list[WaitingQueue]:
    """Every queue in which tasks wait, the longest first; of one user when given."""
    with database.begin() as connection:
        rows = connection.execute(_QUEUES, {"user": user_name}).all()
        if not rows:
            return []
        state = limiting_factors.state(connection, settings)
        return [_queue(row, state) for row in rows]


def _queue(row: Row[Any], state: limiting_factors.SchedulerState) -> WaitingQueue:
    queue = queue_of_task(row)
    bounds = tuple(state.factors(queue, row.run_id, row.waiting, row.models))
    return WaitingQueue(QueueNow(queue, row.waiting, bounds), row.oldest, row.run_id)


def last_hour(connection: Connection, user_name: str = "") -> LastHour:
    """Attempts that ended within the last hour; of one user when given.

    Those that were admitted more than a day ago are not read: ids begin with the time, and the primary key is by them.
    """
    begun = int((time.time() - _DAY_S) * 1000)
    row = connection.execute(_HOUR, {"user": user_name, "since": UUID(int=begun << 80)}).one()
    return LastHour(row.ended, row.lost, row.cost_usd)
