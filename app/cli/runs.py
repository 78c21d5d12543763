"""Commands about runs and tasks: runs, status, show, logs, cancel, retry, artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer
from rich.table import Table

from app.artifacts import open_store
from app.cli.later import later
from app.cli.progress import follow
from app.cli.show import (
    as_json,
    clock,
    console,
    limit_lines,
    results_table,
    reward,
    runs_table,
    say,
    states,
    summary,
)
from app.errors import AmbiguousName, UnknownName
from app.models.outcome import Artifact, ArtifactKind, TaskResult
from app.models.states import TaskState

if TYPE_CHECKING:
    from app.client import MegaFlow, Run
    from app.ledger import events, results
else:
    MegaFlow = later("app.client", "MegaFlow")
    events = later("app.ledger.events")
    results = later("app.ledger.results")

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def register(cli: typer.Typer) -> None:
    for command in (runs, status, show, logs, cancel, retry, artifacts):
        cli.command()(command)


def tell_open_networks(flow: MegaFlow, run: Run) -> None:
    """Say how many tasks of the run reach every public address."""
    if found := results.open_networks(flow.database, run.id):
        console.print(
            f"{found} of {len(run.handles)} tasks have an open network, as their dataset or the submission says:"
            " they reach every public address (--network changes it)",
            highlight=False,
            soft_wrap=True,
        )


def report(flow: MegaFlow, watched: list[Run], found: list[TaskResult], *, json: bool) -> None:
    """The result table, then the score of every run with its denominator."""
    if json:
        as_json({"runs": [_described(flow, run) for run in watched], "results": found})
        return
    console.print(results_table(found))
    for run in watched:
        console.print(summary(flow.status(run.id)), highlight=False)
        tell_open_networks(flow, run)
    console.print(
        f"evidence: {flow.settings.artifacts()}/runs/RUN/TASK/ATTEMPT, or `megaflow show TASK`", soft_wrap=True
    )


def _described(flow: MegaFlow, run: Run) -> dict[str, object]:
    return {**vars_of(flow.status(run.id)), "open_networks": results.open_networks(flow.database, run.id)}


def vars_of(status: results.RunStatus) -> dict[str, object]:
    """A run's status as a mapping."""
    return {name: getattr(status, name) for name in status.__dataclass_fields__}


def runs(limit: Annotated[int, typer.Option(min=1)] = 20, json: Json = False) -> None:
    """List runs, newest first."""
    with MegaFlow() as flow:
        found = results.runs(flow.database, limit)
        if json:
            as_json([vars_of(status) for status in found])
        else:
            console.print(runs_table(found))


def status(
    run: Annotated[str, typer.Argument(help="A run's id, its end, or its name.")],
    watch: Annotated[bool, typer.Option("--watch", help="Live, until all have ended.")] = False,
    json: Json = False,
) -> None:
    """Where a run stands: every task with its mode, instance, end and times."""
    with MegaFlow() as flow:
        found = flow.run(results.find(flow.database, "runs", run))
        if watch:
            follow(flow, [found])
        rows = results.results(flow.database, [handle.task_id for handle in found.handles])
        if not json:
            console.print(f"{states(flow.status(found.id))}", highlight=False)
        report(flow, [found], rows, json=json)


def show(task: Annotated[str, typer.Argument(help="A task's id or its end.")], json: Json = False) -> None:
    """Everything about one task: attempts, phases, verdict, evidence."""
    with MegaFlow() as flow:
        result = _result(flow, task)
        if json:
            as_json(result)
            return
        _print_result(flow, result)


def _result(flow: MegaFlow, task: str) -> TaskResult:
    return results.results(flow.database, [results.find(flow.database, "tasks", task)])[0]


def _print_result(flow: MegaFlow, result: TaskResult) -> None:
    spec = results.task_spec(flow.database, result.task_id)
    console.print(f"[bold]{result.name}[/] {result.task_id} of run {result.run_id}", highlight=False)
    console.print(
        f"{result.state} · {result.agent} · model {result.model or '-'} · {result.mode} · image"
        f" {spec.task.environment.label}",
        highlight=False,
    )
    if result.verdict is not None:
        failed = [name for name, how in result.verdict.tests.items() if how not in ("passed", "skipped")]
        console.print(f"verdict: reward {reward(result)}, {len(result.verdict.tests)} tests, {len(failed)} not passed")
        console.print(f"  {result.verdict.detail}", highlight=False)
        for name in failed[:20]:
            console.print(f"  {result.verdict.tests[name]} {name}", highlight=False, markup=False)
    for attempt in result.attempts:
        end = attempt.end_reason or attempt.state
        console.print(
            f"\n[bold]attempt {attempt.number}[/] {end} on {attempt.instance or 'no instance'}"
            f"{', scripted' if attempt.scripted else ''}",
            highlight=False,
        )
        if attempt.failure is not None:
            console.print(f"  {attempt.failure.error}: {attempt.failure.message}", highlight=False, markup=False)
        if attempt.environment:
            found = {k: v for k, v in attempt.environment.items() if k not in ("teardown", "memory", "processes")}
            console.print(f"  environment: {found}", highlight=False, markup=False)
            for line in limit_lines(attempt):
                console.print(f"  {line}", highlight=False, markup=False)
        for phase, at in attempt.phases.items():
            console.print(f"  {clock(at)}  {phase}", highlight=False)
        for artifact in attempt.artifacts:
            console.print(f"  {artifact.kind}: {_where(artifact)}", highlight=False, markup=False, soft_wrap=True)


def _where(artifact: Artifact) -> str:
    if artifact.url is None:
        return f"none ({artifact.missing})"
    return f"{artifact.url} ({artifact.size_bytes} bytes, sha256 {str(artifact.sha256)[:12]})"


def logs(task: Annotated[str, typer.Argument(help="A task's id or its end.")]) -> None:
    """The events of a task, then its agent's log and its test report."""
    with MegaFlow() as flow:
        result = _result(flow, task)
        for event in events.of_task(flow.database, result.task_id):
            console.print(f"{clock(event.at)} {event.kind} {event.data or ''}", highlight=False, markup=False)
        for kind in (ArtifactKind.AGENT_LOG, ArtifactKind.TEST_REPORT):
            content = _content(flow, result, kind)
            console.print(f"\n--- {kind} ---", highlight=False)
            console.print(content, highlight=False, markup=False, soft_wrap=True)


def _content(flow: MegaFlow, result: TaskResult, kind: ArtifactKind) -> str:
    for artifact in result.artifacts:
        if artifact.kind is kind:
            if artifact.key is None:
                return f"none: {artifact.missing}"
            store = open_store(flow.settings.artifacts(), endpoint_url=flow.settings.s3_endpoint_url)
            return store.get(artifact.key).decode("utf-8", "replace")
    return "none: no attempt has ended"


def cancel(
    target: Annotated[str, typer.Argument(help="A run or a task: its id or the end of it.")],
) -> None:
    """End a run or a task; containers go with it. What has ended stays."""
    with MegaFlow() as flow:
        ids = _tasks_of(flow, target)
        flow.cancel(ids)
        console.print(f"asked {len(ids)} task(s) to end")


def _tasks_of(flow: MegaFlow, target: str) -> list[UUID]:
    try:
        return results.task_ids(flow.database, results.find(flow.database, "runs", target))
    except AmbiguousName:
        raise
    except UnknownName:
        return [results.find(flow.database, "tasks", target)]


def retry(
    run: Annotated[str, typer.Argument(help="A run's id, its end, or its name.")],
    failed: Annotated[bool, typer.Option("--failed", help="Those that could not be measured.")] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Those that were cancelled.")] = False,
) -> None:
    """Run again what was not measured; earlier attempts stay. Graded tasks are results and are not run again."""
    wanted = {TaskState.FAILED} if failed else set()
    wanted |= {TaskState.CANCELLED} if cancelled else set()
    if not wanted:
        raise typer.BadParameter("expected --failed, --cancelled or both")
    with MegaFlow() as flow:
        found = results.results(flow.database, _tasks_of(flow, run))
        moved = flow.retry([result.task_id for result in found if result.state in wanted])
        console.print(f"{len(moved)} task(s) back in line")


def artifacts(
    task: Annotated[str, typer.Argument(help="A task's id or its end.")],
    get: Annotated[Path | None, typer.Option("--get", help="Copy them into this folder.")] = None,
    json: Json = False,
) -> None:
    """List what an attempt left as evidence, or fetch it. Missing pieces are listed with the reason."""
    with MegaFlow() as flow:
        result = _result(flow, task)
        if json:
            as_json([{"attempt": a.number, **x.model_dump(mode="json")} for a in result.attempts for x in a.artifacts])
            return
        if get is not None:
            _fetch(flow, result, get)
            return
        table = Table("attempt", "kind", "where", header_style="bold", pad_edge=False)
        for attempt in result.attempts:
            for artifact in attempt.artifacts:
                table.add_row(str(attempt.number), artifact.kind, _where(artifact))
        console.print(table)


def _fetch(flow: MegaFlow, result: TaskResult, folder: Path) -> None:
    store = open_store(flow.settings.artifacts(), endpoint_url=flow.settings.s3_endpoint_url)
    for attempt in result.attempts:
        for artifact in attempt.artifacts:
            if artifact.key is None:
                say(f"attempt {attempt.number} {artifact.kind}: none ({artifact.missing})")
                continue
            target = folder / str(attempt.number) / Path(artifact.key).name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(store.get(artifact.key))
            console.print(str(target), soft_wrap=True)
