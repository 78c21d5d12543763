"""How far runs are, in one cheap look: counts for a progress display, no rows of single tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import text

from app.ledger.database import Database


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of tasks. `running` is by phase, in the order of the phases; `score`: the mean reward of the scored."""

    total: int
    waiting: int
    starting: int  # a slot is held, no worker has it yet
    ended: int
    failed: int
    cancelled: int
    scored: int
    score: float | None
    scripted: int = 0  # of these the replay engine answered calls: `scored` and `score` are without them
    scripted_score: float | None = None
    running: dict[str, int] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.ended >= self.total


_COUNTS = text(
    """
SELECT count(*) AS total,
    count(*) FILTER (WHERE state = 'pending') AS waiting,
    count(*) FILTER (WHERE state = 'admitted') AS starting,
    count(*) FILTER (WHERE state IN ('succeeded', 'failed', 'cancelled')) AS ended,
    count(*) FILTER (WHERE state = 'failed') AS failed,
    count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
    count(*) FILTER (WHERE counts AND NOT scripted) AS scored,
    avg(reward) FILTER (WHERE counts AND NOT scripted) AS score,
    count(*) FILTER (WHERE counts AND scripted) AS scripted,
    avg(reward) FILTER (WHERE counts AND scripted) AS scripted_score
FROM (SELECT state, scripted, (verdict->>'counts')::bool AS counts, (verdict->>'reward')::float8 AS reward
    FROM tasks WHERE run_id = ANY(:runs)) of_runs
"""
)
_RUNNING = text(
    """
SELECT CASE
        WHEN jsonb_exists(a.phases, 'graded') THEN 'storing'
        WHEN jsonb_exists(a.phases, 'agent_ended') THEN 'grading'
        WHEN jsonb_exists(a.phases, 'environment_ready') THEN 'agent'
        WHEN jsonb_exists(a.phases, 'image_ready') THEN 'environment'
        ELSE 'image' END AS phase, count(*) AS tasks
FROM attempts a JOIN tasks t ON t.id = a.task_id
WHERE a.state = 'running' AND t.run_id = ANY(:runs) GROUP BY 1
"""
)
_PHASES = ("image", "environment", "agent", "grading", "storing")


def progress_of(database: Database, run_ids: Sequence[UUID]) -> Progress:
    """The counts of these runs together, of one moment."""
    with database.begin() as connection:
        counts = connection.execute(_COUNTS, {"runs": list(run_ids)}).one()._asdict()
        by_phase = {row.phase: row.tasks for row in connection.execute(_RUNNING, {"runs": list(run_ids)})}
    return Progress(**counts, running={name: by_phase[name] for name in _PHASES if name in by_phase})
