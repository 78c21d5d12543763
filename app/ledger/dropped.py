"""Counts what a training run does not train on: superseded replicas with their cost and lengths, and attempts."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text

from app.ledger.database import Database

_BOUNDS = (1_024, 4_096, 16_384, 65_536)


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Replicas that ended with fewer than `below` tokens of answers, and in no bucket before. None: any number."""

    below: int | None
    ended: int
    superseded: int

    @property
    def share(self) -> float:
        """Share of the ended replicas that were dropped: large for long ones if a quorum prefers short trajectories."""
        return self.superseded / self.ended


@dataclass(frozen=True, slots=True)
class DroppedReplicas:
    """Dropped replicas of a run. Tokens are of answers; superseded replicas were cut off and would have been longer."""

    added: dict[str, int]  # replicas beyond those submitted, by reason
    superseded: int
    tokens: int
    waste_tokens: int
    waste_usd: float
    by_length: tuple[LengthBucket, ...]


_ROWS = text("""
WITH used AS (
    SELECT task_id, sum(completion_tokens) AS tokens, sum(cost_usd) AS cost FROM model_calls WHERE run_id = :run
    GROUP BY 1
)
SELECT width_bucket(coalesce(u.tokens, 0), CAST(:bounds AS numeric[])) AS bucket, count(*) AS ended,
    count(*) FILTER (WHERE t.end_reason = 'superseded') AS superseded, coalesce(sum(u.tokens), 0) AS tokens,
    coalesce(sum(u.tokens) FILTER (WHERE t.end_reason = 'superseded'), 0) AS waste_tokens,
    coalesce(sum(u.cost) FILTER (WHERE t.end_reason = 'superseded'), 0)::float8 AS waste_usd
FROM tasks t LEFT JOIN used u ON u.task_id = t.id
WHERE t.run_id = :run AND t.state IN ('succeeded', 'failed', 'cancelled') AND t.attempts > 0 GROUP BY 1 ORDER BY 1
""")
_ADDED = text("SELECT added_for, count(*) AS n FROM tasks WHERE run_id = :run AND added_for IS NOT NULL GROUP BY 1")


def dropped(database: Database, run_id: UUID) -> DroppedReplicas:
    """Counts dropped replicas among those that began and have ended. Raises: DatabaseUnavailable."""
    with database.begin() as connection:
        rows = connection.execute(_ROWS, {"run": run_id, "bounds": list(_BOUNDS)}).all()
        added = {row.added_for: row.n for row in connection.execute(_ADDED, {"run": run_id})}
    return DroppedReplicas(
        added=added,
        superseded=sum(row.superseded for row in rows),
        tokens=sum(int(row.tokens) for row in rows),
        waste_tokens=sum(int(row.waste_tokens) for row in rows),
        waste_usd=sum(row.waste_usd for row in rows),
        by_length=tuple(LengthBucket((*_BOUNDS, None)[row.bucket], row.ended, row.superseded) for row in rows),
    )


def unused(database: Database, run_id: UUID) -> dict[str, int]:
    """Counts a run's attempts that are not used for training, by reason; the most frequent first."""
    statement = (
        "SELECT x.reason, count(*) AS n FROM experience_attempts x JOIN experience_groups g USING (group_id)"
        " WHERE g.run_id = :run AND x.reason <> '' GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 100"
    )
    return {row.reason: row.n for row in database.sql(statement, {"run": run_id})}
