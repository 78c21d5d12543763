"""Commands about runs and tasks: runs, status, show, logs, cancel, retry, artifacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

from app.artifacts import ArtifactStore, open_store
from app.cli.progress import follow
from app.cli.show import Json, as_json, clock, console, errors, listing, results_table, reward, say
from app.client import MegaFlow, Run
from app.errors import AmbiguousName, UnknownName
from app.evaluation.validation import is_validator, unvalidated_note
from app.ledger import events, names, results, validations
from app.ledger.database import Database
from app.ledger.results import RunStatus
from app.models.outcome import Artifact, ArtifactKind, AttemptRecord, TaskResult
from app.models.states import ENDED_TASK, TaskState
from app.texts import counted, lasted, limit_lines, outcome, short_id, solved, spans, states, summary

Named = Annotated[str, typer.Argument(help="A task: its name, RUN/TASK, `latest`, or its id or the end of it.")]
NamedRun = Annotated[str, typer.Argument(help="A run: its name, `latest`, or its id or the end of it.")]


def register(cli: typer.Typer) -> None:
    for command in (runs, status, show, logs, cancel, retry, artifacts):
        cli.command()(command)


def open_networks_line(flow: MegaFlow, run: Run) -> str:
    """How many tasks of the run reach every public address; empty when none does."""
    if not (found := results.open_networks(flow.database, run.id)):
        return ""
    return (
        f"{found} of {len(run.handles)} tasks have an open network, as their dataset or the submission says:"
        " they reach every public address (--network changes it)"
    )


def unvalidated_line(flow: MegaFlow, run: Run, found: list[TaskResult]) -> str:
    """How many of its scored tasks ran on images that were not validated; empty when none, or only validators ran."""
    scored = [one for one in found if one.run_id == run.id and one.reward is not None and not is_validator(one.agent)]
    if not scored:
        return ""
    known = validations.states_of_run(flow.database, run.id)
    return unvalidated_note([known[one.task_id].state if one.task_id in known else None for one in scored])


def report(flow: MegaFlow, watched: list[Run], found: list[TaskResult], *, json: bool) -> None:
    """The result table, then the score of every run with its denominator."""
    if json:
        as_json({"runs": [_described(flow, run) for run in watched], "results": found})
        return
    console.print(results_table(found))
    beside = console if console.is_terminal else errors  # a pipe gets the table alone
    for run in watched:
        beside.print(summary(flow.status(run.id), interval(flow, run.id)), soft_wrap=True)
        for line in (open_networks_line(flow, run), unvalidated_line(flow, run, found)):
            if line:
                beside.print(line, soft_wrap=True)
    where = f"{flow.settings.artifacts()}/runs/RUN/TASK/ATTEMPT"
    beside.print(f"evidence: {where}, or `megaflow show TASK`", soft_wrap=True)


def interval(flow: MegaFlow, run_id: UUID) -> str:
    """` (95 %: 42 to 81 %)` of a run's scored tasks; empty where there are none, or without the packages for it.

    Agents that say something about tasks and not about a model have none.
    """
    from app.evaluation import statistics
    from app.evaluation.report import BASELINES

    groups = results.solved_by_task(flow.database, run_id, without=BASELINES)
    try:
        found = statistics.pass_rate(groups)
    except ImportError:  # replicas need the extra `report`
        return ""
    return "" if found is None else f" (95 %: {100 * found.low:.0f} to {100 * found.high:.0f} %)"


def _described(flow: MegaFlow, run: Run) -> dict[str, object]:
    return {
        **asdict(flow.status(run.id)),
        "open_networks": results.open_networks(flow.database, run.id),
        "provenance": results.provenance(flow.database, run.id),
    }


_RUN_COLUMNS: dict[str, Callable[[RunStatus], str]] = {
    "run": lambda one: short_id(one.id),
    "name": lambda one: one.name,
    "submitted": lambda one: f"{lasted((datetime.now(UTC) - one.created_at).total_seconds())} ago",
    "tasks": lambda one: f"{one.ended}/{one.total}",
    "solved": solved,
    "mean": lambda one: "-" if one.mean_reward is None else f"{one.mean_reward:.3f}",
    "states": states,
    "user": lambda one: one.user_name,
}


def runs(limit: Annotated[int, typer.Option(min=1)] = 20, json: Json = False) -> None:
    """List runs, newest first."""
    with MegaFlow() as flow:
        listing(results.runs(flow.database, limit), _RUN_COLUMNS, json=json)


def status(
    run: NamedRun,
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
            (console if console.is_terminal else errors).print(states(flow.status(found.id)))
        report(flow, [found], rows, json=json)


def show(task: Named, json: Json = False) -> None:
    """Everything about one task: attempts, phases, verdict, evidence."""
    with MegaFlow() as flow:
        result = _result(flow, task)
        if task == result.name:
            _say_namesakes(flow, result)
        if json:
            as_json(result)
        else:
            _print_result(flow, result)


def _say_namesakes(flow: MegaFlow, result: TaskResult) -> None:
    others, runs_of_others = names.namesakes(flow.database, result.task_id)
    if others:
        say(
            f"{result.name}: shown is replica {result.replica} of the newest run that has it,"
            f" {short_id(result.run_id)}; {counted(others, 'other task')} of this name, in"
            f" {counted(runs_of_others, 'other run')} or beside it: RUN/{result.name}, {result.name}#1"
        )


def _result(flow: MegaFlow, task: str) -> TaskResult:
    return results.results(flow.database, [results.find(flow.database, "tasks", task)])[0]


def _print_result(flow: MegaFlow, result: TaskResult) -> None:
    spec = results.task_spec(flow.database, result.task_id)
    console.print(outcome(result), style="bold")
    console.print(f"{result.name}, task {result.task_id} of run {result.run_id}")
    model = f", model {result.model}" if result.model else ""
    console.print(f"{result.agent}{model}, {result.mode.value}, image {spec.task.environment.label}")
    if result.verdict is not None:
        _print_verdict(result)
    for attempt in result.attempts:
        _print_attempt(attempt)


def _print_verdict(result: TaskResult) -> None:
    assert result.verdict is not None
    failed = [name for name, how in result.verdict.tests.items() if how not in ("passed", "skipped")]
    tests = f", {len(result.verdict.tests)} tests, {len(failed)} not passed" if result.verdict.tests else ""
    console.print(f"verdict: reward {reward(result)}{tests}; {result.verdict.detail}")
    if result.verdict.suspect:
        claimed = result.verdict.claimed_reward
        told = "" if claimed is None else f"; the grading would have given {claimed:g}"
        console.print(f"  suspect by the rule {result.verdict.suspect}{told}", soft_wrap=True)
    if result.verdict.regraded_at is not None:
        console.print(f"  regraded {result.verdict.regraded_at:%Y-%m-%d %H:%M} UTC by {result.verdict.grader}")
    for one in result.verdict.previous:
        earlier = f"reward {one.reward:g}" if one.reward is not None else "not scored"
        when = f"regraded {one.regraded_at:%Y-%m-%d %H:%M} UTC" if one.regraded_at else "first verdict"
        console.print(f"  before, {when}: {earlier} by {one.grader or 'unknown'}; {one.detail}", soft_wrap=True)
    for name in failed[:20]:
        console.print(f"  {result.verdict.tests[name]} {name}")
    if len(failed) > 20:
        console.print(f"  and {len(failed) - 20} more, in the artifact test_report")


def _print_attempt(attempt: AttemptRecord) -> None:
    end = attempt.end_reason or attempt.state
    console.print(f"\nattempt {attempt.number}: {end} on {attempt.instance or 'no instance'}", style="bold")
    if attempt.failure is not None:
        console.print(f"  {attempt.failure.error}: {attempt.failure.message}")
    if durations := ", ".join(f"{name} {lasted(seconds)}" for name, seconds in spans(attempt).items()):
        console.print(f"  {durations}")
    told = attempt.environment
    facts = [f"{name.replace('_', ' ')} {told[name]}" for name in _FACTS if isinstance(told.get(name), str | int)]
    if facts:
        console.print(f"  environment: {', '.join(facts)}")
    for line in limit_lines(attempt):
        console.print(f"  {line}")
    for artifact in attempt.artifacts:
        if artifact.url is not None:
            console.print(f"  {artifact.kind}: {_where(artifact)}", soft_wrap=True)
    if missing := [artifact.kind.value for artifact in attempt.artifacts if artifact.url is None]:
        console.print(f"  without {', '.join(missing)} (megaflow artifacts says why)")


_FACTS = ("kind", "origin", "path", "network", "image")
"""What of an environment's description is shown."""


def _where(artifact: Artifact) -> str:
    return f"{artifact.url} ({artifact.size_bytes} bytes, sha256 {str(artifact.sha256)[:12]})"


def logs(task: Named) -> None:
    """The events of a task, then its agent's log and its test report."""
    with MegaFlow() as flow:
        result = _result(flow, task)
        console.print(outcome(result), style="bold")
        if result.attempt is not None and (taken := spans(result.attempt)):
            console.print(", ".join(f"{name} {lasted(seconds)}" for name, seconds in taken.items()))
        for event in events.of_task(flow.database, result.task_id):
            console.print(f"{clock(event.at)} {event.kind} {_line(event.data or {})}".rstrip(), soft_wrap=True)
        for kind in (ArtifactKind.AGENT_LOG, ArtifactKind.TEST_REPORT):
            content = _content(flow, result, kind)
            console.print(f"\n--- {kind} ---")
            console.print(content, soft_wrap=True)


def _line(data: Mapping[str, Any]) -> str:
    """An event's facts on one line: `number=1, state=running`; what is empty is left out."""
    return ", ".join(f"{name}={' '.join(str(value).split())}" for name, value in data.items() if value is not None)


def _content(flow: MegaFlow, result: TaskResult, kind: ArtifactKind) -> str:
    for artifact in result.artifacts:
        if artifact.kind is kind:
            if artifact.key is None:
                return f"none: {artifact.missing}"
            return store_of(flow).get(artifact.key).decode("utf-8", "replace")
    return "none: no attempt has ended"


def store_of(flow: MegaFlow) -> ArtifactStore:
    """Where the evidence is."""
    return open_store(flow.settings.artifacts(), endpoint_url=flow.settings.s3_endpoint_url)


def cancel(
    target: Annotated[str, typer.Argument(help="A run or a task: a name, RUN/TASK, `latest`, or an id or its end.")],
) -> None:
    """End a run or a task; containers go with it. What has ended stays."""
    with MegaFlow() as flow:
        ids = _tasks_of(flow, target)
        under_way = [one.task_id for one in results.results(flow.database, ids) if one.state not in ENDED_TASK]
        if not under_way:
            console.print(f"nothing to end: all {len(ids)} task(s) of {target} have ended already")
            return
        flow.cancel(under_way)
        console.print(f"asked {len(under_way)} task(s) to end")


def run_or_task(database: Database, name: str) -> tuple[str, UUID]:
    """What a name means, `run` or `task`, and its id; a run goes first.

    Raises: UnknownName; AmbiguousName.
    """
    try:
        return "run", results.find(database, "runs", name)
    except AmbiguousName:
        raise
    except UnknownName:
        return "task", results.find(database, "tasks", name)


def _tasks_of(flow: MegaFlow, target: str) -> list[UUID]:
    kind, found = run_or_task(flow.database, target)
    return results.task_ids(flow.database, found) if kind == "run" else [found]


def retry(
    run: NamedRun,
    failed: Annotated[bool, typer.Option("--failed", help="Those that could not be scored.")] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Those that were cancelled.")] = False,
) -> None:
    """Run again what was not scored; earlier attempts stay. Graded and superseded tasks are not run again."""
    wanted = {TaskState.FAILED} if failed else set()
    wanted |= {TaskState.CANCELLED} if cancelled else set()
    if not wanted:
        raise typer.BadParameter("expected --failed, --cancelled or both")
    with MegaFlow() as flow:
        found = results.results(flow.database, _tasks_of(flow, run))
        moved = flow.retry([result.task_id for result in found if result.state in wanted])
        console.print(f"{len(moved)} task(s) back in line")


def artifacts(
    task: Named,
    get: Annotated[Path | None, typer.Option("--get", help="Copy them into this folder.")] = None,
    json: Json = False,
) -> None:
    """List what an attempt left as evidence, or fetch it. Missing pieces are listed with the reason."""
    with MegaFlow() as flow:
        result = _result(flow, task)
        if get is not None:
            _fetch(flow, result, get)
            return
    pieces = [{"attempt": one.number, **piece.model_dump()} for one in result.attempts for piece in one.artifacts]
    listing(pieces, _ARTIFACT_COLUMNS, json=json)


_ARTIFACT_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "attempt": lambda one: str(one["attempt"]),
    "kind": lambda one: str(one["kind"]),
    "size": lambda one: "-" if one["size_bytes"] is None else f"{one['size_bytes']:,}",
    "file": lambda one: f"none ({one['missing']})" if one["key"] is None else Path(one["key"]).name,
}


def _fetch(flow: MegaFlow, result: TaskResult, folder: Path) -> None:
    store = store_of(flow)
    for attempt in result.attempts:
        for artifact in attempt.artifacts:
            if artifact.key is None:
                say(f"attempt {attempt.number} {artifact.kind}: none ({artifact.missing})")
                continue
            target = folder / str(attempt.number) / Path(artifact.key).name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(store.get(artifact.key))
            console.print(str(target), soft_wrap=True)
