"""Implements `megaflow record`: stores a run's model answers for the replay engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.cli.runs import NamedRun
from app.cli.show import Json, answer
from app.client import MegaFlow
from app.errors import SpecInvalid
from app.ledger import results
from app.models.outcome import ArtifactKind, TaskResult


def record(run: NamedRun, json: Json = False) -> None:
    """Store a run's model answers, one file per task. The model `replay:RUN ID` gives the same answers again."""
    with MegaFlow() as flow:
        run_id = results.find(flow.database, "runs", run)
        target = flow.settings.recordings / str(run_id)
        task_results = results.results(flow.database, results.task_ids(flow.database, run_id))
        written = fetch(flow, task_results, target)
    text = f"{written} attempts recorded in {target}; --model replay:{run_id} plays them"
    answer({"run_id": run_id, "folder": target, "written": written}, text, json=json)


def fetch(flow: MegaFlow, found: Sequence[TaskResult], folder: Path) -> int:
    """Writes the calls of each task's last attempt into `folder`; returns the number of files.

    Raises: SpecInvalid: the run has no calls at all; ArtifactMissing, ArtifactStoreUnavailable.
    """
    from app.model_service.replay.recordings import file_name

    store, written, missing = flow.store, 0, ""
    for result in found:
        calls = next((piece for piece in result.artifacts if piece.kind is ArtifactKind.MODEL_CALLS), None)
        if calls is None or calls.key is None:
            missing = f"{result.name}: {calls.missing if calls else 'no attempt has ended'}"
            continue
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / file_name(result.name, result.replica, result.agent)
        part = target.with_name(f".{target.name}.part")
        part.write_bytes(store.get(calls.key))
        part.replace(target)  # an engine that reads now sees the old file or the new one
        written += 1
    if not written:
        raise SpecInvalid(
            f"expected a run whose attempts have recorded model calls; found none ({missing}); wait for its end, or"
            " choose a run whose agent uses a model"
        )
    return written
