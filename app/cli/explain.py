"""`megaflow explain`: shows the limiting factors of a task or run, where its time went, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from app.cli.show import Json, as_json, clock, console
from app.cli.tables import Table
from app.client import MegaFlow
from app.installation import run_or_task
from app.ledger.limiting_factors import LimitingFactor
from app.ledger.stories import AttemptStory, CurrentState, QueuePosition, RunStory, Share, TaskStory
from app.texts import clean, lasted, short_id

_BAR = 30
"""Columns of the longest bar."""


def explain(
    target: Annotated[
        str, typer.Argument(metavar="TASK|RUN", help="Id of a task or run, the end of an id, or a run's name.")
    ],
    json: Json = False,
) -> None:
    """Show which limit binds, since when, and what would help; after the end, where the time went."""
    with MegaFlow() as flow:
        kind, target_id = run_or_task(flow.installation, target)
        if kind == "run":
            run = flow.installation.explain_run(target_id)
            plain, page = _plain(run), run_page(run)
        else:
            task = flow.installation.explain_task(target_id)
            plain, page = asdict(task), task_page(task)
    if json:
        as_json(plain)
    else:
        console.print(page)


def _plain(run: RunStory) -> dict[str, Any]:
    """Returns the story as plain data, with each queue's line as a mapping by field name."""
    return asdict(run) | {"now": [asdict(queue) | {"line": queue.line._asdict()} for queue in run.now]}


def task_page(story: TaskStory) -> RenderableType:
    """Lays out a task's story for a person to read, top to bottom."""
    how = f"{story.state}, {story.end_reason}" if story.end_reason else story.state
    parts: list[RenderableType] = [
        f"{story.name} {story.task_id} of run {story.run_id}",
        f"{how} · user {story.user_name} · {story.mode}.{story.resource_class}"
        f" · {lasted(story.seconds)} since {clock(story.accepted_at)} UTC",
    ]
    if story.now is not None:
        parts += ["", *_now(story.now)]
    for attempt in story.tries:
        parts += ["", *_attempt(attempt)]
    whole_s = max(story.seconds, sum(share.seconds for share in story.phases))  # a teardown may follow the end
    parts += ["", shares_table("where the time went", story.phases, whole_s)]
    if story.waits:
        parts += ["", shares_table("waited for", story.waits, story.seconds)]
    return Group(*(Text(clean(part)) if isinstance(part, str) else part for part in parts))


def _now(now: CurrentState) -> Iterable[str]:
    yield f"now {now.doing} (since {clock(now.since)} UTC)"
    for bound in now.bounds:
        yield from _bound(bound)
    if now.place is not None:
        yield f"  {_place(now.place)}"


def _bound(bound: LimitingFactor) -> Iterable[str]:
    count = ""
    if bound.used is not None:
        count = f" {bound.used:g} of {'?' if bound.capacity is None else f'{bound.capacity:g}'}"
    since = f", binding since {clock(bound.since)} UTC" if bound.since else ""
    why = f" ({bound.why})" if bound.why else ""
    yield f"  {bound.limit}{count}{since}{why}"
    helps = bound.help
    yield f"    what would help: {f'`{helps}`' if bound.help.startswith('megaflow ') else helps}"


def _place(place: QueuePosition) -> str:
    return f"place {place.position} of {place.length} in its user's line"


def _attempt(attempt: AttemptStory) -> Iterable[str]:
    where = f" on {attempt.instance}" if attempt.instance else ""
    yield f"attempt {attempt.number} {attempt.end_reason or attempt.state}{where}"
    if attempt.failure:
        yield f"  {attempt.failure}"
    for step in attempt.steps:
        waited = ", ".join(f"{share.name} {lasted(share.seconds)}" for share in step.waits)
        lasts = "" if step.end else ", and goes on"
        yield (
            f"  {clock(step.begin)}  {step.phase:<12}{lasted(step.seconds):>9}{lasts}"
            f"{f'   of it waited for {waited}' if waited else ''}"
        )


def shares_table(title: str, shares: Sequence[Share], whole_s: float | None) -> Table:
    """Builds a table with a row per share: its time, its part of the whole where that is known, and a bar."""
    table = Table("name", "took", "part", "", title=title, header=False, right=("took", "part"))
    longest = max((share.seconds for share in shares), default=0.0)
    for share in shares:
        part = f"{100 * share.seconds / whole_s:.0f} %" if whole_s else ""
        table.add_row(share.name, lasted(share.seconds), part, Text(bar(share.seconds, longest), style="cyan"))
    return table


def bar(value: float, longest: float) -> str:
    """Returns a bar proportional to `value`; every value above 0 is visible."""
    if value <= 0 or longest <= 0:
        return ""
    return "█" * max(1, round(_BAR * value / longest))


def run_page(story: RunStory) -> RenderableType:
    """Lays out the summary of a run for a person."""
    states = ", ".join(f"{count} {state}" for state, count in sorted(story.states.items()))
    parts: list[RenderableType] = [
        f"{story.name} {story.run_id} · user {story.user_name} · {story.total} tasks: {states}"
    ]
    for line in story.now:
        what = f"{line.line.mode}.{line.line.resource_class}"
        parts.append(f"now {line.waiting} task(s) of {what} {'wait for' if line.bounds else 'wait for their turn'}")
        parts += [text for bound in line.bounds for text in _bound(bound)]
    if story.hint:
        parts.append(f"now {story.hint}")
    if story.comes_after:
        parts.append(f"now it {story.comes_after}")
    if story.delayed:
        parts.append(f"now {story.delayed} task(s) wait until their delay is over")
    if story.phases:
        parts += ["", _spreads(story)]
    if story.waits:
        parts += ["", shares_table("waited for, all tasks together", story.waits, None)]
    if story.slowest:
        parts += ["", _slowest(story)]
    if story.retries:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in story.retries)
        parts += ["", f"attempts without a score {reasons}"]
    return Group(*(Text(clean(part)) if isinstance(part, str) else part for part in parts))


def _spreads(story: RunStory) -> Table:
    numbers = ("count", "p50", "p90", "max", "in all")
    table = Table("phase", *numbers, "", title="phases of all attempts", right=numbers)
    longest = max(spread.total_s for spread in story.phases)
    for spread in story.phases:
        values = (spread.p50_s, spread.p90_s, spread.max_s, spread.total_s)
        length = Text(bar(spread.total_s, longest), style="cyan")
        table.add_row(spread.phase, str(spread.count), *(lasted(value) for value in values), length)
    return table


def _slowest(story: RunStory) -> Table:
    table = Table("task", "name", "state", "took", "most of it in", title="slowest tasks", right=["took"])
    for slow in story.slowest:
        table.add_row(short_id(slow.task_id), slow.name, slow.state, lasted(slow.seconds), slow.longest_phase)
    return table
