"""`megaflow export`, `bundle` and `record`: a run for other tools, as a folder of pages, for the replay engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from app.cli.runs import NamedRun
from app.cli.show import Json, answer, as_json, console, say
from app.client import MegaFlow
from app.errors import SpecInvalid
from app.evaluation.export import ExportFormat
from app.ledger import results
from app.models.outcome import ArtifactKind, TaskResult


def export(
    run: NamedRun,
    form: Annotated[ExportFormat, typer.Option("--format", help="Format to write.")],
    to: Annotated[Path, typer.Option("--to", help="The file or folder to make; it must not exist yet.")],
    agent: Annotated[str | None, typer.Option(help="Only tasks of this agent.")] = None,
    replica: Annotated[int | None, typer.Option(min=0, help="Only this replica; the first is 0.")] = None,
    min_reward: Annotated[float, typer.Option(help="For `sft`: only trajectories with at least this reward.")] = 1.0,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="For `sft`: only those with at most this many turns.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a run for other tools: predictions, a Harbor job, tables, trajectories, samples for trainers.

    An existing file or folder is never overwritten.
    """
    with MegaFlow() as flow:
        chosen = {"agent": agent, "replica": replica, "min_reward": min_reward, "max_turns": max_turns}
        result = flow.installation.export(flow.installation.find_run(run), form, to, **chosen)
    if json:
        as_json(result)
        return
    lost = f", {sum(result.left_out.values())} left out" if result.left_out else ""
    console.print(f"{result.written} written to {result.path}{lost}", soft_wrap=True)
    for note in result.notes:
        say(f"note: {note}")


def bundle(
    run: NamedRun,
    to: Annotated[Path, typer.Option("--to", help="The folder to make; it must not exist yet.")],
    json: Json = False,
) -> None:
    """Write a run as a folder of pages and data that need no server: open `index.html` in a browser."""
    with MegaFlow() as flow:
        from app.web.bundle import write_bundle

        pages = write_bundle(flow.settings, flow.database, flow.installation.find_run(run), to, say)
    answer({"path": to, "pages": pages}, f"{pages} pages written; open {to / 'index.html'}", json=json)


def record(run: NamedRun, json: Json = False) -> None:
    """Store a run's model answers, one file per task. The model `replay:RUN ID` gives the same answers again."""
    with MegaFlow() as flow:
        run_id = results.find(flow.database, "runs", run)
        target = flow.settings.recordings / str(run_id)
        task_results = results.results(flow.database, results.task_ids(flow.database, run_id))
        written = _fetched(flow, task_results, target)
    text = f"{written} attempts recorded in {target}; --model replay:{run_id} plays them"
    answer({"run_id": run_id, "folder": target, "written": written}, text, json=json)


def _fetched(flow: MegaFlow, found: Sequence[TaskResult], folder: Path) -> int:
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
