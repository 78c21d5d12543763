"""Reads the results of runs and tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.errors import OptionInvalid, SpecInvalid, UnknownName
from app.ledger.database import Database, sql
from app.ledger.names import find as find
from app.models.endings import EndReason
from app.models.outcome import Artifact, AttemptRecord, TaskResult
from app.models.spec import TaskSpec
from app.models.states import ENDED_TASK, TaskState


@dataclass(frozen=True, slots=True)
class RunStatus:
    """State of a run. `resolved` and `mean_reward` are of the `scored` tasks alone.

    Tasks with scripted answers are not scored: `scripted` counts the graded ones, `scripted_resolved` the solved ones.
    Of the scored, `suspect` have a verdict that a rule set to 0. Of the cancelled, `superseded` were not needed.
    """

    id: UUID
    name: str
    user_name: str
    purpose: str
    created_at: datetime
    total: int
    states: dict[str, int]
    scored: int
    resolved: int
    mean_reward: float | None
    scripted: int
    scripted_resolved: int
    suspect: int
    superseded: int
    finished_at: datetime | None
    rewards_outside: int = 0  # of the scored, those whose reward is below 0 or above 1

    @property
    def ended(self) -> int:
        return sum(self.states.get(state.value, 0) for state in ENDED_TASK)

    @property
    def done(self) -> bool:
        return self.ended >= self.total


@dataclass(frozen=True, slots=True)
class RunHead:
    """A run without its tasks; `ended`: all of its tasks have ended."""

    id: UUID
    name: str
    user_name: str
    purpose: str
    created_at: datetime
    provenance: dict[str, Any] | None  # datasets, revisions, content, selection; None: submitted by task specs
    total: int = 0
    ended: bool = False


def run_head(database: Database, run_id: UUID) -> RunHead:
    """Raises: UnknownName."""
    statement = """
        SELECT id, name, user_name, purpose, created_at, provenance, total, NOT EXISTS
            (SELECT 1 FROM tasks WHERE run_id = :id AND state IN ('pending', 'admitted', 'running')) AS ended
        FROM runs WHERE id = :id"""
    row = database.sql(statement, {"id": run_id}).first()
    if row is None:
        raise UnknownName(f"unknown run {run_id}; `megaflow runs` lists them")
    return RunHead(**row._asdict())


# OFFSET 0: each verdict is parsed once, and not again for every count.
_STATUS = """
SELECT r.id, r.name, r.user_name, r.purpose, r.created_at, r.total,
    (SELECT jsonb_object_agg(state, n) FROM
        (SELECT state, count(*) AS n FROM tasks WHERE run_id = r.id GROUP BY state) s) AS states,
    t.scored, t.resolved, t.mean_reward, t.scripted, t.scripted_resolved, t.suspect, t.superseded, t.finished_at,
    t.rewards_outside
FROM runs r CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE counts AND NOT scripted) AS scored,
        count(*) FILTER (WHERE counts AND NOT scripted AND reward >= 1) AS resolved,
        avg(reward) FILTER (WHERE counts AND NOT scripted) AS mean_reward,
        count(*) FILTER (WHERE counts AND NOT scripted AND NOT reward BETWEEN 0 AND 1) AS rewards_outside,
        count(*) FILTER (WHERE counts AND scripted) AS scripted,
        count(*) FILTER (WHERE counts AND scripted AND reward >= 1) AS scripted_resolved,
        count(*) FILTER (WHERE counts AND NOT scripted AND suspect <> '') AS suspect,
        count(*) FILTER (WHERE end_reason = 'superseded') AS superseded, max(finished_at) AS finished_at
    FROM (SELECT scripted, finished_at, end_reason, (verdict->>'counts')::bool AS counts,
        verdict->>'suspect' AS suspect, (verdict->>'reward')::float8 AS reward
        FROM tasks WHERE run_id = r.id OFFSET 0) of_run) t
"""


def run_status(database: Database, run_id: UUID) -> RunStatus:
    """Raises: UnknownName: no such run, or no id."""
    try:
        UUID(str(run_id))
    except ValueError:
        raise UnknownName(f"expected the id of a run (a UUID, as `run.id`), found {run_id!r:.80}") from None
    row = database.sql(f"{_STATUS} WHERE r.id = :id", {"id": run_id}).first()
    if row is None:
        raise UnknownName(f"unknown run {run_id}; `megaflow runs` lists them")
    return _status(row)


def runs(
    database: Database, limit: int = 50, *, user_name: str | None = None, before: UUID | None = None
) -> list[RunStatus]:
    """Returns the newest runs first; only of one user, and older than the run `before`, when these are given."""
    chosen = """(CAST(:user AS text) IS NULL OR r.user_name = :user)
        AND (CAST(:before AS uuid) IS NULL OR r.created_at < (SELECT created_at FROM runs WHERE id = :before))"""
    statement = text(f"{_STATUS} WHERE {chosen} ORDER BY r.created_at DESC LIMIT :limit")
    rows = database.sql(statement, {"limit": limit, "user": user_name, "before": before})
    return [_status(row) for row in rows]


def open_networks(database: Database, run_id: UUID) -> int:
    """Counts the tasks of a run that have the network `open`."""
    statement = text("""
        SELECT coalesce(sum(t.n), 0) FROM
            (SELECT spec_digest, count(*) AS n FROM tasks WHERE run_id = :id GROUP BY spec_digest) t
            JOIN specs s ON s.digest = t.spec_digest
        WHERE s.body::json #>> '{task,environment,network}' = 'open'""")
    return int(database.sql(statement, {"id": run_id}).scalar_one())


def pass_rates(database: Database, run_id: UUID, baselines: Collection[str] = ()) -> dict[str, float]:
    """Returns the share of solved replicas (0.0 to 1.0) of each scored task of a run, by the task's name.

    Answers of the replay engine are not counted, nor attempts of baselines where there is another agent.
    Raises: OptionInvalid: several agents or models, whose attempts are no replicas of each other.
    """
    statement = text("""
        SELECT name, agent, model, (agent, model)::text AS who,
            avg(CASE WHEN (verdict->>'reward')::float8 >= 1 THEN 1.0 ELSE 0.0 END)::float8 AS rate FROM tasks
        WHERE run_id = :id AND NOT scripted AND (verdict->>'counts')::bool GROUP BY name, agent, model""")
    rows = database.sql(statement, {"id": run_id}).all()
    rows = [row for row in rows if row.agent not in baselines] or rows
    if len(variants := sorted({row.who for row in rows})) > 1:
        who = ", ".join(variants[:4])
        raise OptionInvalid(f"expected pass rates of one agent and model; found {who} in run {run_id}")
    return {row.name: row.rate for row in rows}


def solved_counts(database: Database, run_id: UUID, without: Collection[str] = ()) -> dict[str, list[bool]]:
    """Returns for each scored task of a run whether each replica was solved, solved ones first; for statistics.

    Tasks are named by numbers. without: agents that are left out. Answers of the replay engine are not counted; the
    result is empty where several agents or models are left, whose attempts are no replicas of each other.
    """
    statement = text("""
        SELECT scored, solved, count(*) AS tasks, min(one) AS one, max(other) AS other FROM (
            SELECT count(*) AS scored, count(*) FILTER (WHERE (verdict->>'reward')::float8 >= 1) AS solved,
                min((agent, model)::text) AS one, max((agent, model)::text) AS other FROM tasks
            WHERE run_id = :id AND NOT scripted AND (verdict->>'counts')::bool AND NOT agent = ANY(:without)
            GROUP BY name) of_tasks
        GROUP BY 1, 2""")
    rows = database.sql(statement, {"id": run_id, "without": list(without)}).all()
    if len({who for row in rows for who in (row.one, row.other)}) > 1:
        return {}
    alike = ([n < row.solved for n in range(row.scored)] for row in rows for _ in range(row.tasks))
    return {str(number): solved for number, solved in enumerate(alike)}


def _status(row: Row[Any]) -> RunStatus:
    values = row._asdict()
    return RunStatus(**{**values, "states": values["states"] or {}})


def ended(database: Database, task_ids: Sequence[UUID]) -> list[UUID]:
    """Returns the ids of these tasks that have ended."""
    rows = database.sql(
        "SELECT id FROM tasks WHERE id = ANY(:ids) AND state IN ('succeeded', 'failed', 'cancelled')",
        {"ids": list(task_ids)},
    )
    return list(rows.scalars())


def state_of(database: Database, task_id: UUID) -> TaskState:
    """Raises: UnknownName."""
    state = database.sql("SELECT state FROM tasks WHERE id = :id", {"id": task_id}).scalar()
    if state is None:
        raise UnknownName(f"unknown task {task_id}")
    return TaskState(state)


def task_ids(
    database: Database,
    run_id: UUID,
    *,
    after: UUID | None = None,
    state: TaskState | None = None,
    limit: int | None = None,
) -> list[UUID]:
    """Returns the run's tasks in the order of acceptance; those after `after`, in `state`, at most `limit` of them."""
    statement = """
        SELECT id FROM tasks WHERE run_id = :id AND (CAST(:after AS uuid) IS NULL OR id > :after)
            AND (CAST(:state AS text) IS NULL OR state = :state) ORDER BY id LIMIT :limit"""
    values = {"id": run_id, "after": after, "state": state, "limit": limit}
    return list(database.sql(statement, values).scalars())


def task_spec(database: Database, task_id: UUID) -> TaskSpec:
    """Raises: UnknownName."""
    statement = "SELECT s.body FROM tasks t JOIN specs s ON s.digest = t.spec_digest WHERE t.id = :id"
    body = database.sql(statement, {"id": task_id}).scalar()
    if body is None:
        raise UnknownName(f"unknown task {task_id}")
    return TaskSpec.model_validate_json(body)


def results(database: Database, ids: Sequence[UUID]) -> list[TaskResult]:
    """Returns tasks with all their attempts and artifacts, in the order of `ids`; three queries for any number."""
    values = {"ids": list(ids)}
    with database.begin() as connection:
        tasks = {row.task_id: row._asdict() for row in connection.execute(_TASKS, values)}
        tries = _attempts(connection, values)
    missing = [task_id for task_id in ids if task_id not in tasks]
    if missing:
        raise UnknownName(f"unknown task {missing[0]}")
    return [TaskResult.model_validate({**tasks[task_id], "attempts": tries[task_id]}) for task_id in ids]


_TASKS = text(
    "SELECT id AS task_id, run_id, name, replica, agent, model, coalesce(mode, requested_mode) AS mode, state,"
    " end_reason, verdict, scripted, failure FROM tasks WHERE id = ANY(:ids)"
)


def _attempts(connection: Connection, wanted: dict[str, Any]) -> dict[UUID, list[AttemptRecord]]:
    artifacts: dict[UUID, list[Artifact]] = defaultdict(list)
    for row in sql(
        connection,
        "SELECT r.* FROM artifacts r JOIN attempts a ON a.id = r.attempt_id WHERE a.task_id = ANY(:ids)"
        " ORDER BY r.stored_at, r.kind",
        wanted,
    ):
        fields = {k: v for k, v in row._asdict().items() if k not in ("attempt_id", "stored_at")}
        artifacts[row.attempt_id].append(Artifact.model_validate(fields))
    tries: dict[UUID, list[AttemptRecord]] = defaultdict(list)
    for row in sql(
        connection,
        "SELECT a.id, a.task_id, a.number, a.state, a.mode, a.instance_id, a.environment, a.end_reason, a.failure,"
        " a.verdict, a.scripted, a.phases, i.provider || ' ' || coalesce(i.handle, '?') AS instance FROM attempts a"
        " LEFT JOIN instances i ON i.id = a.instance_id WHERE a.task_id = ANY(:ids) ORDER BY a.number",
        wanted,
    ):
        tries[row.task_id].append(_attempt(row, artifacts[row.id]))
    return tries


def _attempt(row: Row[Any], artifacts: list[Artifact]) -> AttemptRecord:
    values = row._asdict()
    del values["task_id"]
    values["phases"] = {k: v for k, v in sorted(values["phases"].items(), key=lambda item: str(item[1])) if v}
    return AttemptRecord.model_validate({**values, "artifacts": artifacts})


_TRAJECTORY = text("""
SELECT s.key, a.end_reason, t.agent, t.replica = (SELECT replica FROM tasks WHERE id = :task) AS own FROM tasks t
JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
JOIN artifacts s ON s.attempt_id = a.id AND s.kind = 'trajectory' AND s.key IS NOT NULL
WHERE t.run_id = :run AND t.name = :name AND t.id <> :task
    AND (:agent = '' OR t.agent = :agent)
ORDER BY own DESC, t.replica, t.id
""")


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """An attempt's trajectory in the artifact store, and how the attempt ended."""

    key: str
    end_reason: EndReason


def trajectory_of(database: Database, run: str, task_id: UUID, name: str) -> StoredTrajectory:
    """Returns the trajectory that `run` (an id or its end) recorded of task `name`, of the same replica if possible.

    run: of several agents with the one meant, `RUN@AGENT`.
    Raises: UnknownName, AmbiguousName: no such run; SpecInvalid: no trajectory of that task; OptionInvalid: several
    agents did it.
    """
    run, _, agent = run.partition("@")
    run_id = find(database, "runs", run)
    rows = database.sql(_TRAJECTORY, {"run": run_id, "name": name, "task": task_id, "agent": agent}).all()
    if len(agents := sorted({row.agent for row in rows})) > 1:
        raise OptionInvalid(
            f"expected one agent that did task {name!r} in run {run!r}, found {', '.join(agents)}; name one:"
            f" recording:{run}@{agents[0]}"
        )
    row = rows[0] if rows else None
    if row is None:
        raise SpecInvalid(
            f"expected run {run!r} to have a trajectory of task {name!r}, found none; record it with one that calls"
            " a model"
        )
    return StoredTrajectory(row.key, EndReason(row.end_reason))


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of tasks; each is in one of waiting, starting, running and ended.

    `running` is by phase, in the order of the phases; `score`: the mean reward of the scored.
    """

    total: int
    waiting: int
    starting: int  # has a slot, but no worker yet
    ended: int
    failed: int
    cancelled: int
    superseded: int  # group complete without them: not among the cancelled
    scored: int
    score: float | None
    scripted: int = 0  # answered by a replay engine: not in `scored` and `score`
    scripted_score: float | None = None
    running: dict[str, int] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.ended >= self.total


_COUNTS = text(
    """
WITH by_phase AS (
    SELECT CASE
            WHEN jsonb_exists(a.phases, 'graded') THEN 'storing'
            WHEN a.state = 'grading' OR jsonb_exists(a.phases, 'agent_ended') THEN 'grading'
            WHEN jsonb_exists(a.phases, 'environment_ready') THEN 'agent'
            WHEN jsonb_exists(a.phases, 'image_ready') THEN 'environment'
            ELSE 'image' END AS phase, count(*) AS tasks
    FROM attempts a JOIN tasks t ON t.id = a.task_id
    WHERE a.state IN ('running', 'grading') AND t.run_id = ANY(:runs) GROUP BY 1
)
SELECT count(*) AS total,
    count(*) FILTER (WHERE state = 'pending') AS waiting,
    count(*) FILTER (WHERE state = 'admitted') AS starting,
    count(*) FILTER (WHERE state IN ('succeeded', 'failed', 'cancelled')) AS ended,
    count(*) FILTER (WHERE state = 'failed') AS failed,
    count(*) FILTER (WHERE state = 'cancelled' AND end_reason <> 'superseded') AS cancelled,
    count(*) FILTER (WHERE end_reason = 'superseded') AS superseded,
    count(*) FILTER (WHERE counts AND NOT scripted) AS scored,
    avg(reward) FILTER (WHERE counts AND NOT scripted) AS score,
    count(*) FILTER (WHERE counts AND scripted) AS scripted,
    avg(reward) FILTER (WHERE counts AND scripted) AS scripted_score,
    (SELECT coalesce(jsonb_object_agg(phase, tasks), '{}') FROM by_phase) AS running
FROM (SELECT state, end_reason, scripted, (verdict->>'counts')::bool AS counts, (verdict->>'reward')::float8 AS reward
    FROM tasks WHERE run_id = ANY(:runs)) of_runs
"""
)
_PHASES = ("image", "environment", "agent", "grading", "storing")


def progress_of(database: Database, run_ids: Sequence[UUID]) -> Progress:
    """Returns the counts of these runs together, of one moment."""
    counts = database.sql(_COUNTS, {"runs": list(run_ids)}).one()._asdict()
    by_phase = counts.pop("running")
    return Progress(**counts, running={name: by_phase[name] for name in _PHASES if name in by_phase})
