"""Commands about runs and tasks: runs, status, show, logs, cancel, retry, artifacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

from app.cli.progress import follow
from app.cli.show import Json, answer, as_json, clock, console, errors, listing, results_table, reward, say
from app.client import MegaFlow, Run
from app.installation import RunNotes, run_or_task
from app.ledger.results import RunStatus
from app.models.outcome import ArtifactKind, AttemptRecord, TaskResult
from app.models.states import ENDED_TASK, TaskState
from app.texts import lasted, limit_lines, outcome, short_id, solved, spans, states, summary

Named = Annotated[str, typer.Argument(help="A task: its name, RUN/TASK, `latest`, or its id or the end of it.")]
RunOrTask = Annotated[str, typer.Argument(help="A run or a task: a name, RUN/TASK, `latest`, or an id or its end.")]
NamedRun = Annotated[str, typer.Argument(help="A run: its name, `latest`, or its id or the end of it.")]


def open_networks_line(notes: RunNotes, tasks: int) -> str:
    """Returns a line with the number of tasks that reach every public address; empty when none does."""
    if not notes.open_networks:
        return ""
    return (
        f"{notes.open_networks} of {tasks} tasks have an open network, as their dataset or the submission says:"
        " they reach every public address (--network changes it)"
    )


def report(flow: MegaFlow, watched: list[Run], found: list[TaskResult], *, json: bool) -> None:
    """Prints the result table, then the score of every run with its denominator."""
    of_runs = [(run, flow.status(run.id), flow.installation.notes(run.id)) for run in watched]
    if json:
        runs = [
            {**asdict(state), "open_networks": notes.open_networks, "provenance": notes.provenance}
            for _, state, notes in of_runs
        ]
        as_json({"runs": runs, "results": found})
        return
    console.print(results_table(found))
    beside = console if console.is_terminal else errors  # a pipe gets only the table
    for run, state, notes in of_runs:
        beside.print(summary(state, _interval(notes)), soft_wrap=True)
        for line in (open_networks_line(notes, len(run.handles)), notes.unvalidated):
            if line:
                beside.print(line, soft_wrap=True)
    beside.print(f"evidence: {flow.installation.evidence}, or `megaflow show TASK`", soft_wrap=True)


def _interval(notes: RunNotes) -> str:
    """Returns ` (95 %: 42 to 81 %)` for a run's scored tasks; empty without scored tasks or the packages for it.

    Agents that measure tasks and not a model have no interval.
    """
    if notes.interval is None:
        return ""
    low, high = notes.interval
    return f" (95 %: {100 * low:.0f} to {100 * high:.0f} %)"


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


def runs(limit: Annotated[int, typer.Option(min=1, max=100_000)] = 20, json: Json = False) -> None:
    """List runs, newest first."""
    with MegaFlow() as flow:
        listing(flow.installation.runs(limit), _RUN_COLUMNS, json=json)


def status(
    run: NamedRun,
    watch: Annotated[bool, typer.Option("--watch", help="Show progress until all tasks have ended.")] = False,
    json: Json = False,
) -> None:
    """Show a run: every task with its mode, instance, end and times."""
    with MegaFlow() as flow:
        watched = flow.run(flow.installation.find_run(run))
        if watch:
            follow(flow, [watched])
        rows = flow.installation.results([handle.task_id for handle in watched.handles])
        if not json:
            (console if console.is_terminal else errors).print(states(flow.status(watched.id)))
        report(flow, [watched], rows, json=json)


def show(task: Named, json: Json = False) -> None:
    """Show everything about one task: attempts, phases, verdict, artifacts."""
    with MegaFlow() as flow:
        result = _result(flow, task)
    if json:
        as_json(result)
    else:
        _print_result(result)


def _result(flow: MegaFlow, task: str) -> TaskResult:
    return flow.installation.results([flow.installation.find_task(task)])[0]


def _print_result(result: TaskResult) -> None:
    console.print(outcome(result), style="bold")
    console.print(f"{result.name}, task {result.task_id} of run {result.run_id}")
    model = f", model {result.model}" if result.model else ""
    console.print(f"{result.agent}{model}, {result.mode.value}")
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
        note = "" if claimed is None else f"; the grading would have given {claimed:g}"
        console.print(f"  suspect by the rule {result.verdict.suspect}{note}", soft_wrap=True)
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
    description = attempt.environment
    facts = [
        f"{name.replace('_', ' ')} {description[name]}"
        for name in _FACTS
        if isinstance(description.get(name), str | int)
    ]
    if facts:
        console.print(f"  environment: {', '.join(facts)}")
    for line in limit_lines(attempt):
        console.print(f"  {line}")
    for artifact in attempt.artifacts:
        if artifact.url is not None:
            what = f"{artifact.size_bytes} bytes, sha256 {str(artifact.sha256)[:12]}"
            console.print(f"  {artifact.kind}: {artifact.url} ({what})", soft_wrap=True)
    if missing := [artifact.kind.value for artifact in attempt.artifacts if artifact.url is None]:
        console.print(f"  without {', '.join(missing)} (megaflow artifacts says why)")


_FACTS = ("kind", "origin", "path", "network", "image")
"""Facts of an environment's description that are shown."""


def logs(task: Named, json: Json = False) -> None:
    """Print a task's events, its agent's log and its test report."""
    with MegaFlow() as flow:
        result = _result(flow, task)
        events = flow.installation.task_events(result.task_id)
        kinds = (ArtifactKind.AGENT_LOG, ArtifactKind.TEST_REPORT)
        if json:
            texts = {kind.value: _content(flow, result, kind) for kind in kinds}
            as_json({"task_id": result.task_id, "events": [event._asdict() for event in events], **texts})
            return
        console.print(outcome(result), style="bold")
        if result.attempt is not None and (durations := spans(result.attempt)):
            console.print(", ".join(f"{name} {lasted(seconds)}" for name, seconds in durations.items()))
        for event in events:
            console.print(f"{clock(event.at)} {event.kind} {_line(event.data or {})}".rstrip(), soft_wrap=True)
        for kind in kinds:
            content = _content(flow, result, kind)
            console.print(f"\n--- {kind} ---")
            console.print(content, soft_wrap=True)


def _line(data: Mapping[str, Any]) -> str:
    """Returns an event's facts on one line: `number=1, state=running`. Values that are None are left out."""
    return ", ".join(f"{name}={' '.join(str(value).split())}" for name, value in data.items() if value is not None)


def _content(flow: MegaFlow, result: TaskResult, kind: ArtifactKind) -> str:
    for artifact in result.artifacts:
        if artifact.kind is kind and result.attempt is not None:
            if artifact.key is None:
                return f"none: {artifact.missing}"
            return flow.installation.content(result.attempt.id, artifact).decode("utf-8", "replace")
    return "none: no attempt has ended"


def cancel(target: RunOrTask, json: Json = False) -> None:
    """Cancel a run or a task; its containers are removed. Tasks that have ended stay as they are."""
    with MegaFlow() as flow:
        ids = _tasks_of(flow, target)
        under_way = [one.task_id for one in flow.installation.results(ids) if one.state not in ENDED_TASK]
        if under_way:
            flow.cancel(under_way)
    text = f"asked {len(under_way)} task(s) to end"
    if not under_way:
        text = f"nothing to end: all {len(ids)} task(s) of {target} have ended already"
    answer({"task_ids": under_way}, text, json=json)


def _tasks_of(flow: MegaFlow, target: str) -> list[UUID]:
    kind, target_id = run_or_task(flow.installation, target)
    return flow.installation.task_ids(target_id) if kind == "run" else [target_id]


def retry(
    run: RunOrTask,
    failed: Annotated[bool, typer.Option("--failed", help="Tasks that could not be scored.")] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Tasks that were cancelled.")] = False,
    json: Json = False,
) -> None:
    """Run tasks again that were not scored; earlier attempts stay. Graded and superseded tasks are not run again."""
    chosen = {TaskState.FAILED} if failed else set()
    chosen |= {TaskState.CANCELLED} if cancelled else set()
    if not chosen:
        raise typer.BadParameter("expected --failed, --cancelled or both")
    with MegaFlow() as flow:
        rows = flow.installation.results(_tasks_of(flow, run))
        moved = flow.retry([result.task_id for result in rows if result.state in chosen])
        left = sum(result.state in chosen for result in rows) - len(moved)
    why = f"; {left} not: superseded, or after a task that failed, which is to be retried first" if left else ""
    answer({"task_ids": moved}, f"{len(moved)} task(s) back in line{why}", json=json)


def artifacts(
    task: Named,
    get: Annotated[Path | None, typer.Option("--get", help="Copy the artifacts into this folder.")] = None,
    json: Json = False,
) -> None:
    """List the artifacts of a task's attempts, or fetch them. Missing ones are listed with the reason."""
    with MegaFlow() as flow:
        result = _result(flow, task)
        if get is not None:
            _fetch(flow, result, get, silent=json)
    if get is not None and not json:
        return
    pieces = [{"attempt": one.number, **piece.model_dump()} for one in result.attempts for piece in one.artifacts]
    listing(pieces, _ARTIFACT_COLUMNS, json=json)


_ARTIFACT_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "attempt": lambda one: str(one["attempt"]),
    "kind": lambda one: str(one["kind"]),
    "size": lambda one: "-" if one["size_bytes"] is None else f"{one['size_bytes']:,}",
    "file": lambda one: f"none ({one['missing']})" if one["key"] is None else Path(one["key"]).name,
}


def _fetch(flow: MegaFlow, result: TaskResult, folder: Path, *, silent: bool) -> None:
    for attempt in result.attempts:
        for artifact in attempt.artifacts:
            if artifact.key is None:
                say(f"attempt {attempt.number} {artifact.kind}: none ({artifact.missing})")
                continue
            target = folder / str(attempt.number) / Path(artifact.key).name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(flow.installation.content(attempt.id, artifact))
            if not silent:
                console.print(str(target), soft_wrap=True)
