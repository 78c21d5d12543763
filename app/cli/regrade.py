"""`megaflow regrade`: judges kept test reports again, with the graders of this release."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.runs import NamedRun, store_of
from app.cli.show import Json, as_json, console, say
from app.cli.tables import Table
from app.client import MegaFlow
from app.ledger import results

if TYPE_CHECKING:
    from app.environments.contract import Environment
    from app.evaluation.regrade import RegradeSummary
    from app.models.spec import AgentTask


def register(cli: typer.Typer) -> None:
    cli.command()(regrade)


def regrade(
    run: NamedRun,
    grader_version: Annotated[
        str | None, typer.Option(help="Only what this one judged, such as 'swebench 4.1.0' (`report` names them).")
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Grade what was left to graders once more, where no report says it.")
    ] = False,
    json: Json = False,
) -> None:
    """Judge a run's kept test reports again, without agents; earlier verdicts stay beside the new ones.

    On the installation's machine alone: the graders' libraries are there.
    """
    from app.agents.installation import Installer
    from app.artifacts.bundles import fetch_bundle
    from app.cli.orderly import ending_in_order
    from app.cli.shell import EnvironmentRequest, standing
    from app.evaluation.regrade import regrade as regraded
    from app.grading.resident_libraries import GradingLibraries

    with MegaFlow() as flow, ending_in_order():
        store = store_of(flow)

        def place(task: AgentTask) -> AbstractContextManager[Environment]:
            asked = EnvironmentRequest(task, lambda bundle: fetch_bundle(store, bundle))
            return standing(asked, flow.settings, task.limits.grading_timeout_s)

        run_id = results.find(flow.database, "runs", run)
        install = Installer(flow.settings.tools, ready=flow.settings.ready_tools).install_library
        with closing(GradingLibraries(install, most_processes=os.cpu_count() or 1)) as libraries:
            chosen = place if anew else None
            found = regraded(flow.database, store, libraries, run_id, grader=grader_version, place=chosen)
    if json:
        as_json(found)
    else:
        _print_summary(found)


def _print_summary(found: RegradeSummary) -> None:
    changed = f"{found.solved_now} 0→1, {found.unsolved_now} 1→0, {found.unscored_now} unscored"
    table = Table("task", "agent", "before", "after", "now", right=("before", "after"), keys=4)
    for one in found.flips:
        name = f"{one.name}#{one.replica}" if one.replica else one.name
        rewards = ("-" if reward is None else f"{reward:g}" for reward in (one.before, one.after))
        table.add_row(name, one.agent, *rewards, one.detail)
    if found.flips:
        console.print(table)
    console.print(f"{found.judged} judged again: {changed}; {found.stored} new verdicts stored", soft_wrap=True)
    if found.queued:
        say(f"{found.queued} gradings queued again: graders of this installation carry them out")
    for reason, count in found.left_out.items():
        say(f"not regraded: {count}: {reason}")
