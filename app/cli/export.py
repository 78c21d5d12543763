"""`megaflow export`: a run in the formats of leaderboards, spreadsheets and trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.runs import NamedRun
from app.cli.show import Json, answer, as_json, console, say
from app.client import MegaFlow
from app.evaluation.export import ExportFormat
from app.installation import LedgerInstallation


def register(cli: typer.Typer) -> None:
    for command in (export, bundle):
        cli.command()(command)


def export(
    run: NamedRun,
    form: Annotated[ExportFormat, typer.Option("--format", help="What to write.")],
    to: Annotated[Path, typer.Option("--to", help="The file or folder to make; it must not exist yet.")],
    agent: Annotated[str | None, typer.Option(help="Tasks of this agent alone.")] = None,
    replica: Annotated[int | None, typer.Option(min=0, help="These replicas alone; the first is 0.")] = None,
    min_reward: Annotated[float, typer.Option(help="Of `sft`: trajectories with at least this reward.")] = 1.0,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Of `sft`: trajectories with at most these.")] = None,
    json: Json = False,
) -> None:
    """Write a run for others: predictions, a Harbor job, tables, trajectories, samples for trainers.

    Nothing that exists is overwritten.
    """
    with MegaFlow() as flow:
        chosen = {"agent": agent, "replica": replica, "min_reward": min_reward, "max_turns": max_turns}
        found = flow.installation.export(flow.installation.find_run(run), form, to, **chosen)
    if json:
        as_json(found)
        return
    lost = f", {sum(found.left_out.values())} left out" if found.left_out else ""
    console.print(f"{found.written} written to {found.path}{lost}", soft_wrap=True)
    for note in found.notes:
        say(f"note: {note}")


def bundle(
    run: NamedRun,
    to: Annotated[Path, typer.Option("--to", help="The folder to make; it must not exist yet.")],
    json: Json = False,
) -> None:
    """Write a run as a folder of pages and data that need no server: open `index.html` in a browser."""
    with MegaFlow() as flow:
        run_id = flow.installation.find_run(run)
        if isinstance(flow.installation, LedgerInstallation):
            from app.web.bundle import write_bundle

            pages = write_bundle(flow.settings, flow.database, run_id, to, say)
        else:
            pages = flow.installation.bundle(run_id, to)
    answer({"path": to, "pages": pages}, f"{pages} pages written; open {to / 'index.html'}", json=json)
