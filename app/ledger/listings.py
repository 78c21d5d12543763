"""Reads what the web pages list: the tasks of a run by outcome, the waiting queues, the last hour's attempts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.ledger import limiting_factors
from app.ledger.database import Database
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
"""Outcomes of a task or an attempt, each with its letter in `outcome_letters`."""

_OUTCOME = """CASE
    WHEN state = 'pending' THEN 'waiting'
    WHEN state IN ('admitted', 'dispatched', 'running', 'grading') THEN 'running'
    WHEN end_reason = 'superseded' THEN 'superseded'
    WHEN state = 'cancelled' THEN 'cancelled'
    WHEN verdict->>'suspect' <> '' THEN 'suspect'
    WHEN NOT coalesce((verdict->>'counts')::bool, false) THEN 'lost'
    WHEN (verdict->>'reward')::float8 >= 1 THEN 'solved'
    ELSE 'unsolved' END"""


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task of a run as a row of a table."""

    id: UUID
    run_id: UUID
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


_COLUMNS = {"run": "run_id", "state": "state", "end": "end_reason", "user": "user_name", "class": "resource_class"}
_WHERE = {
    **{name: f"{column} = :{name}" for name, column in _COLUMNS.items()},
    "group": "group_id = (SELECT group_id FROM tasks WHERE id = :group)",
    "mode": "coalesce(mode, requested_mode) IN (:mode, CASE state WHEN 'pending' THEN 'auto' END)",
    "agent": "agent = :agent",
    "name": "strpos(name, :name) > 0",
    "instance": "id IN (SELECT task_id FROM attempts WHERE instance_id = CAST(:instance AS uuid)"
    " AND state IN ('dispatched', 'running', 'grading'))",
    "host": "id IN (SELECT task_id FROM attempts a JOIN instances i ON coalesce(i.host, 'unknown') = :host AND"
    " i.state NOT IN ('terminated', 'failed') AND i.id IN (a.instance_id, (SELECT instance_id FROM gradings"
    " WHERE attempt_id = a.id)) WHERE a.state IN ('dispatched', 'running', 'grading'))",
    "holds": "id IN (SELECT task_id FROM attempts WHERE id IN (SELECT attempt_id FROM semaphore_holders"
    " WHERE limit_name = :holds AND granted_at IS NOT NULL AND expires_at > clock_timestamp() UNION SELECT attempt_id"
    " FROM gradings WHERE instance_id IS NOT NULL AND 'slots:grading.' || resource_class = :holds)"
    " OR state IN ('dispatched', 'running') AND 'slots:' || mode || '.' || resource_class = :holds)",
    "waits": "id IN (SELECT task_id FROM attempts WHERE id IN (SELECT attempt_id FROM semaphore_holders"
    " WHERE limit_name = :waits AND granted_at IS NULL AND expires_at > clock_timestamp() UNION SELECT attempt_id"
    " FROM gradings WHERE instance_id IS NULL AND 'slots:grading.' || resource_class = :waits))",
    "model": "(model = :model OR id IN (SELECT task_id FROM model_calls WHERE model = :model))",
    "engine": "id IN (SELECT task_id FROM model_calls WHERE replica = :engine AND id > :recent)",
    "hour": "id IN (SELECT task_id FROM attempts WHERE id > :since AND finished_at > clock_timestamp()"
    " - interval '1 hour' AND (:hour = 'ended' OR state IN ('lost', 'error')))",
}
CONDITIONS = tuple(name for name in _WHERE if name not in ("run", "group"))
"""Filters of a list of tasks. mode: also tasks that may run in either; holds, waits: the limit that they hold or wait
for; engine: called within `ENGINE_S`; hour: their attempts `ended` or were `lost` in the last hour."""
ENGINE_S = 300.0


def task_lines(
    database: Database, conditions: Mapping[str, object], *, outcomes: Sequence[str] = (), limit: int = 100
) -> list[TaskLine]:
    """Returns tasks that fit all conditions: of one run or group in the order of acceptance, else the newest first.

    conditions: `CONDITIONS`, a `run`, the `group` of a task; after: the last task of the page before.
    """
    newest_first = not {"run", "group"} & conditions.keys()
    where = [clause for name, clause in _WHERE.items() if name in conditions]
    where += [f"id {'<' if newest_first else '>'} :after"] if "after" in conditions else []
    statement = f"""
        SELECT * FROM (
            SELECT id, run_id, name, replica, agent, model, state, end_reason, scripted, attempts,
                {_OUTCOME} AS outcome, (verdict->>'reward')::float8 AS reward,
                extract(epoch FROM coalesce(finished_at, clock_timestamp()) - accepted_at)::float8 AS seconds,
                left(coalesce(failure->>'message', verdict->>'detail', ''), 300) AS detail
            FROM tasks WHERE {" AND ".join(where) or "true"}) found
        WHERE :all OR outcome = ANY(:outcomes) ORDER BY id {"DESC" if newest_first else ""} LIMIT :limit"""  # noqa: S608
    bounds = {"since": id_of(time.time() - _DAY_S), "recent": id_of(time.time() - ENGINE_S)}
    values = {**conditions, **bounds, "outcomes": list(outcomes), "all": not outcomes, "limit": limit}
    return [TaskLine(**row._asdict()) for row in database.sql(statement, values)]


def id_of(moment: float) -> UUID:
    """Returns a UUID lower than every id made since `moment`: ids begin with the time."""
    return UUID(int=int(moment * 1000) << 80)


def outcome_letters(database: Database, run_id: UUID) -> str:
    """Returns a letter of `OUTCOMES` for each attempt of a run, by task in the order of acceptance.

    A task that waits for an attempt, or never had one, gets its own letter. Attempts before the last get capitals.
    """
    letters = " ".join(f"WHEN '{name}' THEN '{letter}'" for name, letter in OUTCOMES.items())
    statement = f"""
        WITH cells AS (
            SELECT id, NULL AS before, state, end_reason, verdict FROM tasks WHERE run_id = :run
            UNION ALL SELECT t.id, a.number, a.state, a.end_reason, a.verdict FROM tasks t JOIN attempts a
                ON a.task_id = t.id AND (a.number < t.attempts OR t.state = 'pending')
            WHERE t.run_id = :run AND t.attempts > (t.state <> 'pending')::int)
        SELECT coalesce(string_agg(CASE WHEN before > 0 THEN upper(letter) ELSE letter END, '' ORDER BY id, before), '')
        FROM (SELECT id, before, CASE ({_OUTCOME}) {letters} END AS letter FROM cells) of_run"""  # noqa: S608
    return str(database.sql(statement, {"run": run_id}).scalar_one())


def cell_at(database: Database, run_id: UUID, index: int, number: int) -> Row[Any] | None:
    """Returns ids of the task at `index` of that order (from 0) and of its attempt `number`, if any; None: no task."""
    statement = """
        SELECT t.id AS task_id, a.id AS attempt_id FROM (SELECT id FROM tasks WHERE run_id = :run ORDER BY id
        OFFSET :index LIMIT 1) t LEFT JOIN attempts a ON a.task_id = t.id AND a.number = :number"""
    return database.sql(statement, {"run": run_id, "index": index, "number": number}).first()


@dataclass(frozen=True, slots=True)
class WaitingQueue:
    """A queue and the limits that keep it waiting. `oldest`: when its longest-waiting task was accepted."""

    now: QueueNow
    oldest: datetime
    run_id: UUID  # of that task


@dataclass(frozen=True, slots=True)
class LastHour:
    """Attempts that ended within the last hour. `lost`: those that infrastructure ended."""

    ended: int
    lost: int
    cost_usd: float | None  # of model calls; None: known for no attempt

    @property
    def loss(self) -> float | None:
        """Share of attempts that were lost."""
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
    """Returns the queues with waiting tasks, the longest first, at most 50; of one user when given."""
    with database.begin() as connection:
        rows = connection.execute(_QUEUES, {"user": user_name}).all()
        if not rows:
            return []
        state = limiting_factors.state(connection, settings)
    queues = []
    for row in rows:
        queue = queue_of_task(row)
        bounds = tuple(state.factors(queue, row.run_id, row.waiting, row.models))
        queues.append(WaitingQueue(QueueNow(queue, row.waiting, bounds), row.oldest, row.run_id))
    return queues


def last_hour(connection: Connection, user_name: str = "") -> LastHour:
    """Counts attempts that ended within the last hour; of one user when given.

    Attempts admitted more than a day ago are not read: ids begin with the time, and the primary key is by them.
    """
    since = id_of(time.time() - _DAY_S)
    row = connection.execute(_HOUR, {"user": user_name, "since": since}).one()
    return LastHour(row.ended, row.lost, row.cost_usd)
