"""Runs the transcript checks over the trajectories of a run, one trajectory in memory at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from uuid import UUID

from app.artifacts import ArtifactStore
from app.errors import ArtifactMissing
from app.evaluation.report import BASELINES, repository
from app.evaluation.transcript_checks import RULES, TranscriptFinding, TranscriptSubject, check
from app.ledger import report_rows, results
from app.ledger.database import Database
from app.ledger.report_rows import ReportRow
from app.models.outcome import Artifact, ArtifactKind
from app.models.spec import Wire

_MOST_BYTES = 256 << 20
"""Limit of a trajectory; larger ones are reported as unread."""
_MOST_RUN_BYTES = 512 << 20
"""Limit of all trajectories of a run in an automatic check: about twenty seconds."""
_RULES_VERSION = 1
"""Version of the rules: findings of other versions are checked again. Raise it with `transcript_checks`."""


class TaskFindings(Wire):
    """Findings of the rules in the transcript of a task's last attempt."""

    task_id: str
    name: str
    replica: int
    agent: str
    reward: float | None
    findings: tuple[TranscriptFinding, ...]


class TranscriptReport(Wire):
    """Numbers of checked transcripts, and findings by task. `rules`: number of tasks by rule."""

    checked: int
    without: int  # tasks of agents with a model that have no transcript, or none that can be read
    passed_over: int = 0  # beyond the limit of an automatic check
    rules: dict[str, int]
    tasks: tuple[TaskFindings, ...]

    def named(self, rule: str) -> list[TaskFindings]:
        """Returns the tasks in which a rule found something."""
        return [one for one in self.tasks if any(finding.rule == rule for finding in one.findings)]


class _RunChecks(Wire):
    """Findings, and the digest of the attempts and rules that they belong to."""

    of: str
    found: TranscriptReport


def checked_once(database: Database, store: ArtifactStore, run_id: UUID, rows: Sequence[ReportRow]) -> TranscriptReport:
    """Returns the findings stored with the run's artifacts. Checks and stores them if none are of these attempts.

    Raises: ArtifactStoreUnavailable, DiskFull.
    """
    attempts = sorted(
        f"{row.task_id} {row.attempts} {row.end_reason} {row.verdict.get('regraded_at')}"
        for row in rows
        if row.agent not in BASELINES
    )
    of = hashlib.sha256("\n".join([str(_RULES_VERSION), *attempts]).encode()).hexdigest()
    key = f"runs/{run_id}/transcript_checks.json"
    try:
        stored = _RunChecks.model_validate_json(store.get(key))
    except (ArtifactMissing, ValueError):
        stored = None
    if stored is not None and stored.of == of:
        return stored.found
    report = check_run(database, store, run_id)
    store.put(key, _RunChecks(of=of, found=report).model_dump_json().encode())
    return report


def check_run(database: Database, store: ArtifactStore, run_id: UUID) -> TranscriptReport:
    """Checks the last attempt of each task by an agent with a model, up to 512 MiB of transcripts in all.

    Raises: ArtifactStoreUnavailable.
    """
    checked, without, passed_over, read_bytes = 0, 0, 0, 0
    tasks: list[TaskFindings] = []
    for rows in report_rows.batches(database, run_id):
        with_model = [row for row in rows if row.agent not in BASELINES]
        for row, result in zip(with_model, results.results(database, [r.task_id for r in with_model]), strict=True):
            artifact = next((one for one in result.artifacts if one.kind is ArtifactKind.TRAJECTORY), None)
            read_bytes += (artifact.size_bytes or 0) if artifact else 0
            if read_bytes > _MOST_RUN_BYTES:
                passed_over += 1
                continue
            trajectory = _trajectory(store, artifact)
            if trajectory is None:
                without += 1
                continue
            checked += 1
            if findings := check(trajectory, _subject(row)):
                tasks.append(_findings(row, findings))
    rules = {rule: sum(any(f.rule == rule for f in one.findings) for one in tasks) for rule in RULES}
    return TranscriptReport(checked=checked, without=without, passed_over=passed_over, rules=rules, tasks=tuple(tasks))


def _trajectory(store: ArtifactStore, artifact: Artifact | None) -> Mapping[str, object] | None:
    if artifact is None or artifact.key is None or (artifact.size_bytes or 0) > _MOST_BYTES:
        return None
    try:
        trajectory = json.loads(store.get(artifact.key))
    except (ArtifactMissing, ValueError, RecursionError):
        return None
    return trajectory if isinstance(trajectory, dict) else None


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
