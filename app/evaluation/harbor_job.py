"""Writes a run as a Harbor job: a folder of trials for Harbor's viewer, uploader and leaderboard.

Source: harbor 0.25.0, `models.job`, `models.trial` and `models.trial.paths`; the layout of submissions and the
requirements of Terminal-Bench's leaderboard (five trials of a task, trajectories of what passed, unchanged timeouts and
resources) from its page.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.evaluation.export import ExportSource, content_of, safe_name
from app.ledger.report_rows import ReportRow
from app.models.endings import EndReason
from app.models.outcome import Artifact, ArtifactKind, Phase, TaskResult

_FEWEST_TRIALS = 5
"""Number of trials per task that the leaderboard requires."""
_FILES = {
    ArtifactKind.TRAJECTORY: "agent/trajectory.json",
    ArtifactKind.AGENT_LOG: "agent/agent.log",
    ArtifactKind.TEST_REPORT: "verifier/test-stdout.txt",
    ArtifactKind.PATCH: "artifacts/patch.diff",
}
"""File of each stored artifact in a trial's folder, by kind."""


@dataclass
class _JobCounts:
    """Totals for the job's own result, by names of trials."""

    trials: Counter[str] = field(default_factory=Counter)  # by task
    rewards: dict[str, dict[float, list[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    errors: dict[str, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    agents: dict[tuple[str, str | None], None] = field(default_factory=dict)
    attempts: int = 1
    scripted: int = 0
    suspect: int = 0
    bare: int = 0  # solved trials without a trajectory
    ended_at: str | None = None


def write_harbor_job(source: ExportSource, to: Path) -> int:
    """Writes `metadata.yaml` for the leaderboard, and the job with a folder per trial. Returns the number of trials."""
    job = to / safe_name(source.head.name or "run")
    job.mkdir(parents=True)
    counts = _JobCounts()
    for row, result in source.tasks():
        if row.end_reason is None:
            source.leave_out(row, "not ended yet")
            continue
        if row.end_reason == EndReason.SUPERSEDED:
            source.leave_out(row, "superseded: its group was complete without it")
            continue
        _write_trial(source, job, row, result, counts)
    _write(job / "config.json", _job_config(source, counts))
    _write(job / "result.json", _job_result(source, counts))
    (to / "metadata.yaml").write_text(_metadata(counts), encoding="utf-8")
    source.notes.extend(_notes(counts))
    return counts.trials.total()


def _write_trial(source: ExportSource, job: Path, row: ReportRow, result: TaskResult, counts: _JobCounts) -> None:
    name = f"{safe_name(row.name)[:32]}__{str(row.task_id)[-12:]}"
    folder = job / name
    has_trajectory = _write_artifacts(source, folder, result.artifacts)
    trial = _trial(source, row, name)
    _write(folder / "config.json", trial["config"])
    _write(folder / "result.json", trial)
    if (reward := _reward(row)) is not None:
        (folder / "verifier" / "reward.txt").write_text(f"{reward:g}\n", encoding="utf-8")
    key = "__".join(filter(None, (row.agent, row.model, _dataset(source) or "adhoc")))
    _count(counts, row, name, key, has_trajectory=has_trajectory)


def _write_artifacts(source: ExportSource, folder: Path, artifacts: tuple[Artifact, ...]) -> bool:
    """Writes the stored artifacts. Returns whether there is a trajectory."""
    for name in ("agent", "verifier", "artifacts"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    has_trajectory = False
    for artifact in artifacts:
        place = _FILES.get(artifact.kind)
        if place is not None and (content := content_of(source.store, artifact)) is not None:
            (folder / place).write_bytes(content)
            has_trajectory |= artifact.kind is ArtifactKind.TRAJECTORY
    return has_trajectory


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _trial(source: ExportSource, row: ReportRow, name: str) -> dict[str, Any]:
    """Builds a trial's result in Harbor's fields. Facts without a field there are in the agent's metadata."""
    reward = _reward(row)
    phases = row.phases
    model = {"name": row.model, "provider": None} if row.model else None
    return {
        "id": str(row.task_id),
        "task_name": row.name,
        "trial_name": name,
        "trial_uri": f"megaflow:{source.run_id}/{row.task_id}",
        "task_id": {"path": safe_name(row.name)},
        "source": _dataset(source),
        "task_checksum": f"megaflow-spec:{row.spec_digest}",
        "config": {
            "task": {"path": safe_name(row.name), "source": _dataset(source)},
            "trial_name": name,
            "agent": {"name": row.agent, "model_name": row.model},
            "job_id": str(source.run_id),
        },
        "agent_info": {
            "name": row.agent,
            "version": str(row.environment.get("agent_version") or "unknown"),
            "model_info": model,
        },
        "agent_result": _agent_result(row),
        "verifier_result": None if reward is None else {"rewards": {"reward": reward}},
        "exception_info": _exception(row),
        "started_at": phases.get(Phase.CLAIMED),
        "finished_at": _ended_at(row),
        "environment_setup": _between(phases, Phase.CLAIMED, Phase.ENVIRONMENT_READY),
        "agent_execution": _between(phases, Phase.AGENT_STARTED, Phase.AGENT_ENDED),
        "verifier": _between(phases, Phase.GRADING_STARTED, Phase.GRADED)
        or _between(phases, Phase.AGENT_ENDED, Phase.GRADED),
    }


def _agent_result(row: ReportRow) -> dict[str, Any]:
    usage = row.environment.get("usage") or {}
    task = row.spec["task"]
    resources = task["environment"]["resources"]
    return {
        "n_input_tokens": usage.get("prompt_tokens"),
        "n_cache_tokens": usage.get("cached_tokens"),
        "n_output_tokens": usage.get("completion_tokens"),
        "cost_usd": usage.get("cost_usd"),
        "metadata": {
            "end_reason": row.end_reason,
            "scripted": row.scripted,
            "suspect": row.verdict.get("suspect", ""),
            "claimed_reward": row.verdict.get("claimed_reward"),
            "grader": row.verdict.get("grader", ""),
            "image_id": row.environment.get("image_id"),
            "limits": task["limits"],
            "resources": resources,
            "memory_kills": row.memory_kills,
            "throttled_s": row.throttled_s,
        },
    }


def _exception(row: ReportRow) -> dict[str, Any] | None:
    if not row.failure:
        return None
    return {
        "exception_type": "CancelledError" if row.state == "cancelled" else str(row.failure.get("error")),
        "exception_message": str(row.failure.get("message", "")),
        "exception_traceback": "",
        "occurred_at": _ended_at(row) or "1970-01-01T00:00:00+00:00",
    }


def _reward(row: ReportRow) -> float | None:
    reward = row.verdict.get("reward")
    return float(reward) if row.verdict.get("counts") and reward is not None else None


def _ended_at(row: ReportRow) -> str | None:
    times = [at for phase in Phase if phase is not Phase.TORN_DOWN and (at := row.phases.get(phase))]
    return max(times, default=None)


def _between(phases: dict[str, str], begin: Phase, end: Phase) -> dict[str, str] | None:
    if not phases.get(begin) or not phases.get(end):
        return None
    return {"started_at": phases[begin], "finished_at": phases[end]}


def _dataset(source: ExportSource) -> str | None:
    datasets = (source.head.provenance or {}).get("datasets") or []
    return str(datasets[0]["name"]) if len(datasets) == 1 and datasets[0].get("name") else None


def _count(counts: _JobCounts, row: ReportRow, name: str, key: str, *, has_trajectory: bool) -> None:
    reward = _reward(row)
    counts.trials[f"{row.agent} {row.model} {row.name}"] += 1
    counts.agents[(row.agent, row.model)] = None
    counts.attempts = max(counts.attempts, row.replica + 1)
    counts.scripted += row.scripted
    counts.suspect += bool(row.verdict.get("suspect"))
    if reward is not None:
        counts.rewards[key][reward].append(name)
        counts.bare += reward >= 1.0 and not has_trajectory
    if (error := _exception(row)) is not None:
        counts.errors[key][error["exception_type"]].append(name)
    counts.ended_at = max(filter(None, (counts.ended_at, _ended_at(row))), default=None)


def _job_config(source: ExportSource, counts: _JobCounts) -> dict[str, Any]:
    return {
        "job_name": safe_name(source.head.name or "run"),
        "n_attempts": counts.attempts,
        "agents": [{"name": agent, "model_name": model} for agent, model in counts.agents],
    }


def _job_result(source: ExportSource, counts: _JobCounts) -> dict[str, Any]:
    errors = {key: sum(map(len, kinds.values())) for key, kinds in counts.errors.items()}
    evals = {
        key: {
            "n_trials": sum(map(len, counts.rewards[key].values())),
            "n_errors": errors.get(key, 0),
            "reward_stats": {"reward": {str(reward): names for reward, names in counts.rewards[key].items()}},
            "exception_stats": dict(counts.errors[key]),
        }
        for key in sorted({*counts.rewards, *counts.errors})
    }
    return {
        "id": str(source.run_id),
        "started_at": source.head.created_at.isoformat(),
        "finished_at": counts.ended_at,
        "n_total_trials": counts.trials.total() + source.left_out.total(),
        "stats": {
            "n_completed_trials": counts.trials.total(),
            "n_errored_trials": sum(errors.values()),
            "n_pending_trials": source.left_out.total(),
            "evals": evals,
        },
    }


def _metadata(counts: _JobCounts) -> str:
    """Builds a submission's facts about its agent and models; the submitter fills in the empty ones."""
    models = sorted({model for _, model in counts.agents if model})
    metadata = {
        "agent_url": "",
        "agent_display_name": ", ".join(sorted({agent for agent, _ in counts.agents})),
        "agent_org_display_name": "",
        "models": [
            {"model_name": name, "model_provider": "", "model_display_name": name, "model_org_display_name": ""}
            for name in models
        ],
    }
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)


def _notes(counts: _JobCounts) -> list[str]:
    """Lists what keeps the job from a leaderboard, as far as known."""
    fewest = min(counts.trials.values(), default=0)
    checks = [
        (fewest < _FEWEST_TRIALS, f"{fewest} trials of a task; the leaderboard asks for {_FEWEST_TRIALS}"),
        (counts.bare > 0, f"{counts.bare} solved trials have no trajectory; the leaderboard asks for all of them"),
        (counts.scripted > 0, f"{counts.scripted} trials were answered by the replay engine: no result of a model"),
        (counts.suspect > 0, f"{counts.suspect} trials are suspect: reward 0, the claim is in the agent's metadata"),
        (True, "timeouts and resources are those that the tasks were submitted with: see that they are the dataset's"),
        (True, "metadata.yaml lacks what MegaFlow does not know: URL, organisation and provider"),
    ]
    return [note for applies, note in checks if applies]
