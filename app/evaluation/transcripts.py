"""Runs the transcript checks over the trajectories of a run, one trajectory in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from uuid import UUID

from app.artifacts import ArtifactStore
from app.errors import ArtifactMissing
from app.evaluation.report import BASELINES, repository
from app.evaluation.transcript_checks import RULES, TranscriptFinding, TranscriptSubject, check
from app.ledger import report_rows, results
from app.ledger.database import Database
from app.ledger.report_rows import ReportRow
from app.models.outcome import ArtifactKind, TaskResult
from app.models.spec import Wire

__all__ = ["TaskFindings", "TranscriptReport", "check_run"]

_MOST_BYTES = 256 << 20
"""Of a trajectory; a larger one is told as unread."""


class TaskFindings(Wire):
    """What the rules found in the transcript of a task's last attempt."""

    task_id: str
    name: str
    replica: int
    agent: str
    reward: float | None
    findings: tuple[TranscriptFinding, ...]


class TranscriptReport(Wire):
    """How many transcripts were checked, and what was found in which tasks. `rules`: by rule, how many tasks."""

    checked: int
    without: int  # tasks of agents with a model that have no transcript, or none that can be read
    rules: dict[str, int]
    tasks: tuple[TaskFindings, ...]

    def named(self, rule: str) -> list[TaskFindings]:
        """The tasks in which a rule found something."""
        return [one for one in self.tasks if any(finding.rule == rule for finding in one.findings)]


def check_run(database: Database, store: ArtifactStore, run_id: UUID) -> TranscriptReport:
    """Check the last attempt of each task that an agent with a model did. Raises: ArtifactStoreUnavailable."""
    checked, without = 0, 0
    tasks: list[TaskFindings] = []
    for rows in report_rows.batches(database, run_id):
        with_model = [row for row in rows if row.agent not in BASELINES]
        for row, result in zip(with_model, results.results(database, [r.task_id for r in with_model]), strict=True):
            trajectory = _trajectory(store, result)
            if trajectory is None:
                without += 1
                continue
            checked += 1
            if found := check(trajectory, _subject(row)):
                tasks.append(_findings(row, found))
    rules = {rule: sum(any(f.rule == rule for f in one.findings) for one in tasks) for rule in RULES}
    return TranscriptReport(checked=checked, without=without, rules=rules, tasks=tuple(tasks))


def _trajectory(store: ArtifactStore, result: TaskResult) -> Mapping[str, object] | None:
    artifact = next((one for one in result.artifacts if one.kind is ArtifactKind.TRAJECTORY), None)
    if artifact is None or artifact.key is None or (artifact.size_bytes or 0) > _MOST_BYTES:
        return None
    try:
        found = json.loads(store.get(artifact.key))
    except (ArtifactMissing, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _subject(row: ReportRow) -> TranscriptSubject:
    base = row.spec["task"]["goal"].get("base_commit")
    named = repository(row)
    return TranscriptSubject(base if isinstance(base, str) else "", "" if named == "unknown" else named)


def _findings(row: ReportRow, found: list[TranscriptFinding]) -> TaskFindings:
    reward = row.verdict.get("reward")
    return TaskFindings(
        task_id=str(row.task_id),
        name=row.name,
        replica=row.replica,
        agent=row.agent,
        reward=None if reward is None else float(reward),
        findings=tuple(found),
    )
