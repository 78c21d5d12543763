"""`megaflow demo`: set everything up, run the main job on the demo dataset, and show the graded results."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from app.cli.orderly import ending_in_order
from app.cli.progress import follow
from app.cli.show import Json, as_json, console, reward, say
from app.cli.stack import where_the_pages_are
from app.cli.tables import Table, shortened
from app.client import MegaFlow, Run
from app.models.outcome import TaskResult
from app.models.spec import REPLAY_MODEL, AgentTask, EnvironmentKind, Mode, Network
from app.texts import lasted, outcome, short_id

EXPECTED = {"oracle": 1.0, "nop": 0.0, "mini-swe-agent": 1.0}
"""Agents of the demo, with the reward of each on every task. mini-swe-agent gets every other task: its start alone
costs five seconds of processor time."""


def demo(
    environment: Annotated[
        EnvironmentKind | None, typer.Option(help="Default: docker; local when no container engine is available.")
    ] = None,
    json: Json = False,
) -> None:
    """Set everything up, run the demo dataset with three agents in both modes, and show the graded results.

    Expected: oracle gets 1 on every task, nop 0, and mini-swe-agent 1 with conversations of the replay engine.
    """
    from app import evaluation
    from app.settings import load
    from app.stack import base_image, lifecycle

    begun = time.monotonic()
    settings = load()
    stack = lifecycle.up(settings, say)
    kind = environment or (EnvironmentKind.DOCKER if stack.engine.available else EnvironmentKind.LOCAL)
    contained = kind in (EnvironmentKind.DOCKER, EnvironmentKind.OCI)
    if kind is EnvironmentKind.DOCKER or (contained and stack.engine.available):
        base_image.ensure_base_image(settings, report=say)  # without it every task of the demo would fail
    if not contained:
        say("NO ISOLATION: tasks run in temporary folders of this host, in the environment `local`")
    with ending_in_order(), MegaFlow(settings) as flow:
        tasks = evaluation.demo_tasks(settings, kind)
        runs = [run for agent in EXPECTED for run in _main_job(flow, agent, tasks, contained=contained)]
        say(f"{sum(len(run.handles) for run in runs)} tasks accepted in {len(runs)} runs")
        results = follow(flow, runs)
        if json:
            as_json({"runs": [run.status() for run in runs], "results": results})
    wrong = [result for result in results if result.reward != EXPECTED[result.agent]]
    if not json:
        _print_results(results, wrong)
        _print_next(runs, wrong[0] if wrong else results[-1])
        where_the_pages_are(settings, "/runs")
    say(f"the demo took {lasted(time.monotonic() - begun)}; `{_program()} down` stops everything")
    if wrong:
        raise typer.Exit(1)


def _main_job(flow: MegaFlow, agent: str, tasks: list[AgentTask], *, contained: bool) -> list[Run]:
    """Submits every other task in ephemeral mode and the others in persistent mode.

    contained: tasks run in containers. Then those of mini-swe-agent that build their image reach only the model.
    """
    if agent == "mini-swe-agent":
        tasks = tasks[::2]
    if agent == "mini-swe-agent" and contained:
        tasks = [_to_model_only(task) if task.environment.build else task for task in tasks]
    model = None if agent in ("oracle", "nop") else REPLAY_MODEL
    return [
        flow.enqueue_many(chosen, agent=agent, mode=mode, model=model, name=f"demo-{agent}-{mode}")
        for mode, chosen in ((Mode.EPHEMERAL, tasks[0::2]), (Mode.PERSISTENT, tasks[1::2]))
    ]


def _to_model_only(task: AgentTask) -> AgentTask:
    return task.model_copy(update={"environment": task.environment.model_copy(update={"network": Network.MODEL_ONLY})})


def _print_results(found: list[TaskResult], wrong: list[TaskResult]) -> None:
    """Prints a summary line, a row per task with the reward of each agent, then each unexpected result."""
    console.print(f"{len(found)} tasks, {len(found) - len(wrong)} as expected")
    table = Table("task", *EXPECTED, right=EXPECTED, keys=4)
    rewards = {(result.name, result.agent): reward(result) for result in found}
    for name in dict.fromkeys(result.name for result in found):
        table.add_row(name, *(rewards.get((name, agent), "") for agent in EXPECTED))
    console.print(table)
    for result in wrong:
        expected = f"{EXPECTED[result.agent]:g}"
        console.print(
            f"UNEXPECTED: {result.name} with {result.agent}: reward {reward(result)}, expected {expected}:"
            f" {_why(result)}; try `{_program()} logs {short_id(result.task_id)}`, or `{_program()} doctor`",
            soft_wrap=True,
        )


def _why(result: TaskResult) -> str:
    """Returns the grading's detail or the failure, on one line."""
    detail = result.verdict.detail if result.verdict is not None else outcome(result)
    return shortened(" ".join(detail.split()), 300) or "its grading says nothing"


def _print_next(runs: list[Run], example: TaskResult) -> None:
    run, task = short_id(runs[-1].id), short_id(example.task_id)
    program = _program()
    for command, meaning in (
        (f"{program} status {run}", "a run, task by task"),
        (f"{program} show {task}", "a task: its end and evidence"),
        (f"{program} logs {task}", "its events and logs"),
        (f"{program} report {short_id(runs[0].id)}", "a run's score, its interval, versions"),
    ):
        console.print(f"{command:<42}{meaning}", soft_wrap=True)


def _program() -> str:
    """Returns this command as a shell finds it here: `megaflow` if that is this program, else its path."""
    own, on_path = Path(sys.argv[0]).absolute(), shutil.which("megaflow")
    if on_path is not None and Path(on_path).samefile(own):
        return "megaflow"
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)
