"""`megaflow export` and `megaflow bundle`: a run in the formats of other tools, or as a folder of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.runs import NamedRun
from app.cli.show import Json, answer, as_json, console, say
from app.client import MegaFlow
from app.evaluation.export import ExportFormat


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
