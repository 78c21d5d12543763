"""Commands about the system itself: up, down, doctor, demo."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from app.cli.runs import follow, report
from app.cli.show import as_json, console, say
from app.client import MegaFlow, Run
from app.errors import InstallationFailed
from app.models.outcome import TaskResult
from app.models.spec import EnvironmentKind, Mode
from app.settings import Settings, load


def register(cli: typer.Typer) -> None:
    for command in (up, down, doctor, demo):
        cli.command()(command)


def up(
    install: Annotated[
        bool, typer.Option(help="Install Docker Engine from Debian's packages when it is missing.")
    ] = True,
) -> None:
    """Start everything on this machine: servers, workers, beat, Flower. Safe to repeat."""
    from app.stack import lifecycle

    found = lifecycle.up(load(), say, may_install=install)
    console.print(f"up in {found.took_s:.1f} s: {', '.join(found.programs)}", highlight=False)
    if found.restart_needed:
        say("the running stack has other settings than these; `megaflow down && megaflow up` to change them")
    _flower(load())


def _flower(settings: Settings) -> None:
    from app.stack import flower

    where = flower.password_file(settings)
    password = f"password in {where}" if where is not None else "password from the settings"
    console.print(f"Flower: {flower.url(settings)} (user {settings.flower_user}, {password})", soft_wrap=True)


def down(
    purge: Annotated[bool, typer.Option("--purge", help="Delete the data too.")] = False,
) -> None:
    """Stop everything that `up` started; no process, container, network or volume of ours is left."""
    from app.stack import lifecycle

    found = lifecycle.down(load(), say, purge=purge)
    engine = ", and the container engine that we had started" if found.engine_stopped else ""
    console.print(f"down: {len(found.programs)} programs stopped{engine}")
    if found.engine_kept_for:
        say(f"the container engine keeps running for {found.engine_kept_for} containers of others")


def doctor(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Look at everything that a task needs, and name the mend for what is missing. Changes nothing."""
    from app.stack import doctor as surgery

    found = surgery.checks(load())
    if json:
        as_json([vars_of(check) for check in found])
    else:
        table = Table("", "check", "found", "mend", header_style="bold", pad_edge=False)
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in found:
            table.add_row(f"[{colours[check.level]}]{check.level}[/]", check.name, check.found, check.mend)
        console.print(table)
    if any(check.level == "fail" for check in found):
        raise typer.Exit(1)


def vars_of(check: object) -> dict[str, str]:
    return {name: str(getattr(check, name)) for name in ("name", "level", "found", "mend")}


EXPECTED = {"oracle": 1.0, "nop": 0.0, "mini-swe-agent": 1.0}
"""Agents of the demo, with the reward of each on every task. mini-swe-agent gets every other task: its start alone
costs five seconds of processor time."""


def demo(
    environment: Annotated[
        EnvironmentKind | None, typer.Option(help="Default: docker, or local when no engine can be had.")
    ] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Set everything up, run the demo dataset with three agents in both modes, and show the graded results.

    Expected: oracle 1 on every task, nop 0, mini-swe-agent solves them through the replay engine.
    """
    from app.stack import base_image, lifecycle

    begun = time.monotonic()
    settings = load()
    stack = lifecycle.up(settings, say)
    kind = environment or (EnvironmentKind.DOCKER if stack.engine.available else EnvironmentKind.LOCAL)
    if kind is EnvironmentKind.DOCKER:
        base_image.ensure_base_image(settings, report=say)  # without it every task of the demo would fail
    else:
        say("NO ISOLATION: tasks run in temporary folders of this host, in the environment `local`")
    with MegaFlow(settings) as flow:
        runs = [run for agent in EXPECTED for run in _submit_both_modes(flow, agent, kind)]
        say(f"{sum(len(run.handles) for run in runs)} tasks accepted in {len(runs)} runs")
        found = follow(flow, runs)
        report(flow, runs, found, json=json)
        wrong = _unexpected(found)
    if not json:
        _flower(settings)
    say(f"the demo took {time.monotonic() - begun:.0f} s; `megaflow down` stops everything")
    for line in wrong:
        say(line)
    if wrong:
        raise typer.Exit(1)


def _submit_both_modes(flow: MegaFlow, agent: str, kind: EnvironmentKind) -> list[Run]:
    """Every other task on an instance of its own, the others on the standing pool."""
    from app.workers import evaluations
    from app.workers.evaluations import Submission

    names = [task.name for task in evaluations.demo_tasks(flow.settings, kind)]
    if agent == "mini-swe-agent":
        names = names[::2]
    if not names:
        raise InstallationFailed("expected the demo dataset inside the package, found none; reinstall")
    runs = []
    for mode, chosen in ((Mode.EPHEMERAL, names[0::2]), (Mode.PERSISTENT, names[1::2])):
        submission = Submission(
            dataset="demo", agent=agent, mode=mode, environment=kind, only=tuple(chosen), name=f"demo-{agent}-{mode}"
        )
        accepted = evaluations.submit(submission, flow.settings, flow.database)
        runs.append(flow.run(accepted.run_id, accepted.task_ids, accepted.names))
    return runs


def _unexpected(found: list[TaskResult]) -> list[str]:
    return [
        f"UNEXPECTED: {result.name} with {result.agent}: reward {result.reward}, expected {EXPECTED[result.agent]};"
        f" `megaflow show {str(result.task_id)[-12:]}`"
        for result in found
        if result.reward != EXPECTED[result.agent]
    ]
