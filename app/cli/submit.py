"""Implements `megaflow submit`: one dataset as one run, described by options, a file, or both."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import run_file
from app.cli.progress import follow
from app.cli.runs import open_networks_line, report
from app.cli.show import Json, answer, as_json, console, say
from app.cli.submission_options import SubmissionOptions, takes_options
from app.client import MegaFlow, Run
from app.models.spec import MOST_WAIT_S, TaskSpec
from app.models.states import TaskState
from app.texts import counted

EPILOG = """\b
Examples:
  megaflow submit demo -a oracle --wait
  megaflow submit tasks/ -a mini-swe-agent -m NAME -k 4
  megaflow submit swe-bench-verified -a nop --task 'django__*' --sample 50
  megaflow submit swe-gym=rows.jsonl -a oracle --repo 'python/*'
  megaflow submit -c run.yaml --model OTHER
"""
_SHOWN = 20
"""Maximum names of tasks that a dry run prints."""


@takes_options
def submit(
    dataset: Annotated[
        list[str],
        typer.Argument(
            help="NAME[@REVISION] (`megaflow dataset list`), NAME=PATH, a file of rows, task folders, or `demo`;"
            " several form one pool."
        ),
    ],
    *,
    options: SubmissionOptions,
    name: Annotated[str, typer.Option(help="A name for the run.")] = "",
    idempotency_key: Annotated[
        str | None, typer.Option(help="Idempotency key: the same key submits only once.")
    ] = None,
    delay: Annotated[
        float, typer.Option(min=0, max=MOST_WAIT_S, help="Seconds to wait before the first attempt.")
    ] = 0.0,
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Start when all tasks of this run have succeeded; may be repeated."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show progress to the end; exit code 1: none scored.")] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait at most.")] = None,
    json: Json = False,
    config: run_file.ConfigOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything against the running stack; submit nothing.")
    ] = False,
) -> None:
    """Submit a dataset as one run: all of its tasks, or none if one is malformed."""
    submission = options.submission(dataset, name=name, delay_s=delay)
    with MegaFlow() as flow:
        check = options.check(flow)
        upstream = [handle for one in after or () for handle in flow.run(flow.installation.find_run(one)).handles]
        if dry_run:
            _tried(flow.trial(submission, check=check), options.replicas, json=json)
            return
        run = flow.submit(submission, idempotency_key=idempotency_key, check=check, after=upstream)
        if not wait:
            _submitted(flow, run, json=json)
            return
        say(f"run {run.id}: {counted(len(run.handles), 'task')} accepted")
        task_results = follow(flow, [run], timeout=timeout)
        report(flow, [run], task_results, json=json)
        lost = sum(one.state is TaskState.FAILED for one in task_results)
        if lost:
            say(f"{counted(lost, 'task')} without a score: `megaflow diagnose {str(run.id)[-12:]}` says why")
    if all(one.state is TaskState.FAILED for one in task_results):
        raise typer.Exit(1)


def _submitted(flow: MegaFlow, run: Run, *, json: bool) -> None:
    tasks = [{"task_id": handle.task_id, "name": handle.name} for handle in run.handles]
    fields = {
        "run_id": run.id,
        "tasks": tasks,
        "open_networks": (notes := flow.installation.notes(run.id)).open_networks,
    }
    fields |= {"page": (page := f"{flow.installation.web_base}/runs/{run.id}")}
    answer(
        fields,
        f"run {run.id}: {counted(len(tasks), 'task')} accepted; `megaflow status {str(run.id)[-12:]}`",
        json=json,
    )
    if not json:
        say(f"page: {page} ({'your token' if flow.server else '`megaflow web`'} signs you in)")
    if not json and (line := open_networks_line(notes, len(tasks))):
        console.print(line, soft_wrap=True)


def _tried(specs: list[TaskSpec], replicas: int, *, json: bool) -> None:
    names = [spec.task.name for spec in specs]
    if json:
        as_json({"would_submit": len(specs) * replicas, "replicas": replicas, "tasks": names})
        return
    console.print(f"nothing was submitted; without --dry-run: {len(specs) * replicas} tasks, {replicas} of each of")
    for spec in specs[:_SHOWN]:
        console.print(f"  {spec.task.name} ({spec.agent})", soft_wrap=True)
    if len(specs) > _SHOWN:
        console.print(f"  and {len(specs) - _SHOWN} more")
