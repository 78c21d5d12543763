"""Implements `megaflow regrade`: grades stored test reports again with the graders of this release."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.runs import NamedRun
from app.cli.show import Json, as_json, console, say
from app.cli.tables import Table
from app.client import MegaFlow

if TYPE_CHECKING:
    from app.environments.contract import Environment
    from app.evaluation.regrade import RegradeSummary, VerifierPlace
    from app.models.spec import AgentTask


def regrade(
    run: NamedRun,
    grader_version: Annotated[
        str | None, typer.Option(help="Only verdicts of this grader, such as 'swebench 4.1.0' (`report` lists them).")
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Run the graders again for verdicts that no stored report can give.")
    ] = False,
    json: Json = False,
) -> None:
    """Grade a run's stored test reports again, without agents. Earlier verdicts stay."""
    from app.cli.orderly import ending_in_order

    with MegaFlow() as flow, ending_in_order():
        place = _place(flow) if anew else None
        summary = flow.ledger.regrade(flow.installation.find_run(run), grader=grader_version, place=place)
    if json:
        as_json(summary)
    else:
        _print_summary(summary)


def _place(flow: MegaFlow) -> VerifierPlace:
    """Returns a function that makes environments on this host."""
    from app.artifacts.bundles import fetch_bundle
    from app.cli.shell import standing

    store = flow.store

    def place(task: AgentTask) -> AbstractContextManager[Environment]:
        limit_s = task.limits.grading_timeout_s
        return standing(task, lambda bundle: fetch_bundle(store, bundle), flow.settings, limit_s)

    return place


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
