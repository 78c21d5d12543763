"""Writes verdicts that were given again, beside those that they replace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text

from app.ledger.database import Database
from app.models.outcome import Verdict

__all__ = ["NewVerdict", "record"]


@dataclass(frozen=True, slots=True)
class NewVerdict:
    """What replaces an attempt's verdict; that one is the last of `verdict.previous`."""

    attempt_id: UUID
    verdict: Verdict


# Lock order as everywhere: attempt, then task. An attempt whose verdict is no longer the one that was read is left out.
_RECORD = text("""
WITH given AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:verdicts AS jsonb[])) AS g(id, verdict)
), mine AS MATERIALIZED (
    SELECT a.id FROM attempts a JOIN given g ON g.id = a.id
    WHERE a.state = 'finished'
        AND a.verdict->>'regraded_at' IS NOT DISTINCT FROM g.verdict#>>'{previous,-1,regraded_at}'
    ORDER BY a.id FOR UPDATE OF a
), done AS (
    UPDATE attempts a SET verdict = g.verdict FROM given g JOIN mine ON mine.id = g.id WHERE a.id = g.id
    RETURNING a.id, a.task_id, a.number, a.instance_id, g.verdict
), of_tasks AS (
    UPDATE tasks t SET verdict = done.verdict FROM done
    WHERE t.id = done.task_id AND t.attempts = done.number AND t.state = 'succeeded' RETURNING t.id, t.run_id
)
INSERT INTO events (kind, run_id, task_id, attempt_id, instance_id, data)
SELECT 'attempt.regraded', of_tasks.run_id, of_tasks.id, done.id, done.instance_id, jsonb_build_object(
    'reward', done.verdict->'reward', 'grader', done.verdict->'grader',
    'previous_reward', done.verdict#>'{previous,-1,reward}', 'previous_grader', done.verdict#>'{previous,-1,grader}')
FROM done JOIN of_tasks ON of_tasks.id = done.task_id
RETURNING attempt_id
""")


def record(database: Database, found: Sequence[NewVerdict]) -> set[UUID]:
    """Store the verdicts with their attempts and tasks; the attempts that were written, another's regrade left out."""
    if not found:
        return set()
    values = {
        "ids": [one.attempt_id for one in found],
        "verdicts": [json.dumps(one.verdict.model_dump(mode="json")) for one in found],
    }
    return {row.attempt_id for row in database.sql(_RECORD, values)}
