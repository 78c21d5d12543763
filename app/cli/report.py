"""Implements `megaflow report`, `compare` and `diagnose`: rates, comparison and failures of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from app.cli.runs import NamedRun
from app.cli.show import Json, as_json, console, say
from app.cli.tables import Table
from app.client import MegaFlow
from app.errors import ArtifactStoreUnavailable, DiskFull, ExportRefused
from app.texts import grading_cost, lasted

if TYPE_CHECKING:
    from app.evaluation.comparison import Comparison
    from app.evaluation.diagnosis import FailureGroup
    from app.evaluation.report import Report, Slice
    from app.evaluation.statistics import Rate
    from app.evaluation.transcripts import TranscriptReport

_SHOWN = 10
"""Maximum rows of a table, and names in a list, on a terminal; `--json` has all."""


def report(
    run: NamedRun,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as one self-contained HTML file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the report into this file: .png or .svg (extra `plots`).")
    ] = None,
    allow_loss: Annotated[
        bool, typer.Option("--allow-loss", help="Show the rate even if infrastructure lost more than 2 %.")
    ] = False,
    json: Json = False,
) -> None:
    """Print a run's pass rate with its interval, the tasks not scored, cost, and what the numbers depend on."""
    for file in (html, plot):
        if file is not None and file.exists():
            raise ExportRefused(f"expected a file that does not exist yet; found {file}; choose another or remove it")
    if plot is not None:
        from app.cli import plots

        plots.check_place(plot)
    with MegaFlow() as flow:
        run_id = flow.installation.find_run(run)
        run_report = flow.installation.report(run_id, allow_loss=allow_loss)
        findings = _transcripts_of(flow, run_report)
    if html is not None:
        _write_page(html, run_report, findings)
    if plot is not None:
        plots.draw(run_report, plot)
        say(f"written to {plot}")
    if json:
        as_json({**run_report.model_dump(mode="json"), **({"transcripts": findings} if findings else {})})
    elif html is None and plot is None:
        _print_report(run_report, findings)


def _transcripts_of(flow: MegaFlow, made: Report) -> TranscriptReport | None:
    """Returns the rules' findings. None: the run goes on, no agent called a model, or the storage is unavailable."""
    if made.headline.unfinished or not made.headline.total:
        return None
    try:
        return flow.installation.transcripts(UUID(made.run_id))
    except (ArtifactStoreUnavailable, DiskFull) as error:
        say(f"note: transcripts were not checked: {error}")
        return None


def _write_page(html: Path, made: Report, found: TranscriptReport | None) -> None:
    from app.evaluation.pages import html_page

    with html.open("x", encoding="utf-8") as page:
        page.write(html_page(made, found))
    say(f"written to {html}")


_ALLOWED = "image, limits, resources, agent, prompt, tests or grader: compare although it differs; may be repeated."


def compare(
    first: Annotated[str, typer.Argument(help="A run: its name, `latest`, or its id or the end of it.")],
    second: Annotated[str, typer.Argument(help="The run to compare with it.")],
    allow: Annotated[list[str] | None, typer.Option("--allow", help=_ALLOWED)] = None,
    power: Annotated[
        float | None, typer.Option("--power", min=0.0001, max=1, help="Print how many replicas show this difference.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare the second run with the first, task by task. Refused where more than the model differs."""
    from app.evaluation.comparison import SAME

    if unknown := [one for one in allow or () if one not in SAME]:
        raise typer.BadParameter(f"expected {', '.join(SAME)}; found {unknown[0]!r}", param_hint="--allow")
    with MegaFlow() as flow:
        ids = [flow.installation.find_run(name) for name in (first, second)]
        comparison = flow.installation.compare(ids[0], ids[1], allow=allow or (), power=power)
    if json:
        as_json(comparison)
    else:
        _print_comparison(comparison, first, second)


def diagnose(run: NamedRun, json: Json = False) -> None:
    """Group a run's failures by what they have in common, the most frequent first."""
    with MegaFlow() as flow:
        groups = flow.installation.diagnose(flow.installation.find_run(run))
    if json:
        as_json(groups)
        return
    if not groups:
        console.print("nothing failed")
    for group in groups:
        _print_group(group)


def _print_report(made: Report, found: TranscriptReport | None) -> None:
    agents, several = made.by["agent"], len(made.by["agent"]) > 1
    if not agents:
        console.print(f"{made.run}: no agent that asks a model, so no pass rate", style="bold", soft_wrap=True)
    elif several:
        console.print(f"{made.run}: {len(agents)} agents or models, each with a pass rate of its own", soft_wrap=True)
    for part in agents:
        console.print(f"{part.name if several else made.run}: {_rate(part.rate)}", style="bold", soft_wrap=True)
        console.print(f"{part.solved} solved of {part.scored} scored, of {part.total} tasks{_cost(part)}")
        for cause, count in part.lost.items():
            console.print(f"not scored: {count} {cause}", soft_wrap=True)
        if met := _limits_met(part):
            console.print(f"limits met: {met}", soft_wrap=True)
    if found is not None:
        _print_transcripts(found)
    if whole := [*(agents if several or not agents else [made.headline]), *made.baselines]:
        _print_slices("", whole)
    for name, parts in made.by.items():
        if len(parts) > 1 and name != "agent":
            _print_slices(f"by {name}", parts)
    for part in agents:
        _print_replicas(part, of=f" ({part.name})" if several else "")
    for task, names in list(made.flaky.items())[: _SHOWN if console.is_terminal else None]:
        console.print(f"flaky in {task}: {_some(names, 5)}", soft_wrap=True)
    for one in made.baselines:
        if one.unstable:
            console.print(f"\nunstable with {one.name}: {_some(one.unstable)}", soft_wrap=True)
    for note in made.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print("\ndepends on", style="bold")
    for name, values in made.versions.items():
        console.print(f"  {name}: {_few(values)}", soft_wrap=True)
    for dataset in _datasets(made):
        console.print(f"  dataset: {dataset}", soft_wrap=True)


def _print_slices(title: str, parts: Sequence[Slice]) -> None:
    shown = parts[:_SHOWN] if console.is_terminal else parts
    cells = [{title or "agents": part.name, **_figures(part)} for part in shown]
    headers = [name for name in cells[0] if name in _ALWAYS or any(row[name] for row in cells)]
    table = Table(*headers, right=headers[1:], keys=5)
    for row in cells:
        table.add_row(*(row[name] for name in headers))
    console.print("")
    console.print(table)
    if len(parts) > len(shown):
        console.print(f"and {len(parts) - len(shown)} more (`| cat` shows all)", style="dim")


_ALWAYS = ("solved", "scored", "rate", "95 %")
"""Columns that are shown even when they are empty."""


def _figures(part: Slice) -> dict[str, str]:
    rate, cost = part.rate, part.cost_per_solved_usd
    return {
        "solved": str(part.solved),
        "scored": str(part.scored),
        "rate": "-" if rate is None else f"{100 * rate.value:.1f} %",
        "95 %": "-" if rate is None else _bounds(rate),
        "not scored": str(sum(part.lost.values()) or ""),
        "suspect": str(part.suspect or ""),
        "scripted": str(part.scripted or ""),
        "per solved": "" if cost is None else f"${cost:.2f}",
    }


def _print_replicas(part: Slice, *, of: str) -> None:
    if len(part.pass_at) < 2:
        return
    heads = (f"pass@k, one of k{of}", "pass^k, all of k")
    table = Table("k", *heads, right=heads, keys=3)
    for k in sorted(part.pass_at):
        table.add_row(str(k), f"{100 * part.pass_at[k]:.1f} %", f"{100 * part.pass_hat.get(k, 0.0):.1f} %")
    console.print("")
    console.print(table)


def _print_transcripts(found: TranscriptReport) -> None:
    without = f", {found.without} tasks have none" if found.without else ""
    without += f", {found.passed_over} not read: too large in all" if found.passed_over else ""
    nothing = ": no rule found anything" if found.checked and not found.tasks else ""
    console.print(f"{found.checked or 'no'} transcripts checked{without}{nothing}", soft_wrap=True)
    for rule, count in found.rules.items():
        if count:
            names = [f"{one.name}#{one.replica}" if one.replica else one.name for one in found.named(rule)]
            console.print(f"  {rule}: {count} tasks: {_some(names)}", soft_wrap=True)


def _rate(rate: Rate | None) -> str:
    return "nothing scored" if rate is None else f"{100 * rate.value:.1f} % (95 %: {_bounds(rate)} %, {rate.method})"


def _bounds(rate: Rate) -> str:
    return f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"


def _cost(part: Slice) -> str:
    facts = [
        *([] if part.cost_usd is None else [f"${part.cost_usd:.2f} in all"]),
        *([] if part.cost_per_solved_usd is None else [f"${part.cost_per_solved_usd:.2f} per solved"]),
        *([] if part.seconds_per_solved is None else [f"{lasted(part.seconds_per_solved)} of agents per solved"]),
        *([] if part.grading_s is None else [f"grading {grading_cost(part.grading_s, part.grading_usd)}"]),
    ]
    return f"; {', '.join(facts)}" if facts else ""


def _limits_met(part: Slice) -> str:
    facts = [
        *([f"{part.memory_kills} processes killed for memory"] if part.memory_kills else []),
        *([f"throttled {lasted(part.throttled_s)}"] if part.throttled_s else []),
        *([f"{part.out_of_time} out of time"] if part.out_of_time else []),
    ]
    return ", ".join(facts)


def _datasets(made: Report) -> Iterable[str]:
    for one in (made.provenance or {}).get("datasets", ()):
        content = f", content {str(one['content_hash'])[:12]}" if one.get("content_hash") else ""
        revision = f"@{one['revision']}" if one.get("revision") else ""
        source = one.get("derived_from")
        filtered = f", {source['chosen']} of {source['tasks']} by {source['pass_rate']}" if source else ""
        yield f"{one.get('name', 'unknown')}{revision}{content}{filtered}"


def _some(values: Sequence[str], most: int = _SHOWN, between: str = ", ") -> str:
    return f"{between.join(values[:most])}{f' and {len(values) - most} more' if len(values) > most else ''}"


def _few(values: Sequence[str]) -> str:
    shown = [value[:19] if value.startswith("sha256:") else value for value in values]  # `--json` has full digests
    return _some(shown, 3, "; ")


def _print_comparison(found: Comparison, first: str, second: str) -> None:
    one = found.difference
    console.print(f"{100 * one.value:+.1f} points on {found.tasks} tasks of both", style="bold")
    console.print(f"95 %: {100 * one.low:+.1f} to {100 * one.high:+.1f} points ({one.method})")
    if one.low <= 0 <= one.high:
        console.print("the interval contains 0: chance alone may give this")
    majority = " (each task once, solved where more than half of its replicas are)" if found.by_majority else ""
    console.print(f"McNemar, exact: p = {found.mcnemar_p:.3g}{majority}", soft_wrap=True)
    for name, rate, names in ((first, found.first, found.only_first), (second, found.second, found.only_second)):
        console.print(f"{name}: {_rate(rate)}", soft_wrap=True)
        if names:
            console.print(f"  solved {len(names)} that the other did not: {_some(names)}", soft_wrap=True)
    for what, (values, other) in found.differs.items():
        console.print(f"differs: {what}: {_few(values)} | {_few(other)}", soft_wrap=True)
    if found.power_difference is not None:
        needed = found.replicas_needed
        shown = (
            "more tasks: replicas alone do not"
            if needed is None
            else f"{needed} replica{'s' if needed > 1 else ''} of each task"
        )
        points = f"{100 * found.power_difference:g} points"
        console.print(f"to show a difference of {points} four times in five: {shown}")


def _print_group(group: FailureGroup) -> None:
    console.print(f"{group.count} {group.end_reason}: {group.error} after {group.phase}", style="bold")
    console.print(f"  {group.line}", soft_wrap=True)
    for word, counts in (("on", group.hosts), ("with", group.images)):
        console.print(f"  {word} {', '.join(f'{name} ({count})' for name, count in counts.items())}", soft_wrap=True)
    first, *others = (task[-12:] for task in group.examples)
    more = f" (or {', '.join(others)})" if others else ""
    console.print(f"  megaflow show {first}{more}")
