"""What earlier attempts left that others can do again."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text

from app.errors import SpecInvalid
from app.ledger import results
from app.ledger.database import Database
from app.models.endings import EndReason

_FIND = text("""
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
    """What was recorded in `run` (an id or the end of one) of the task called `name`; of the same replica if it can be.

    run: of several agents with the one meant, `RUN@AGENT`.
    Raises: UnknownName, AmbiguousName: no such run; SpecInvalid: it has no such task, no trajectory of it, or several
    agents that did it.
    """
    run, _, agent = run.partition("@")
    run_id = results.find(database, "runs", run)
    with database.begin() as connection:
        found = connection.execute(_FIND, {"run": run_id, "name": name, "task": task_id, "agent": agent}).all()
    if len(agents := sorted({row.agent for row in found})) > 1:
        raise SpecInvalid(
            f"expected one agent that did task {name!r} in run {run!r}, found {', '.join(agents)}; name one:"
            f" recording:{run}@{agents[0]}"
        )
    row = found[0] if found else None
    if row is None:
        raise SpecInvalid(
            f"expected run {run!r} to have a trajectory of task {name!r}, found none; record it with one that calls"
            " a model"
        )
    return StoredTrajectory(row.key, EndReason(row.end_reason))
