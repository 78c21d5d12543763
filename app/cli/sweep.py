"""Implements `megaflow sweep`: the same tasks with several values of one setting, and the effect on the score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from app.cli.progress import follow, submit_all
from app.cli.show import Json, as_json, console, say
from app.cli.submission_options import SubmissionOptions, factor_of, takes_options
from app.cli.tables import Table
from app.client import MegaFlow
from app.errors import OptionInvalid
from app.evaluation import Submission, statistics
from app.evaluation.report import Slice, groups_of, slice_of
from app.evaluation.statistics import Rate
from app.ledger import report_rows
from app.ledger.report_rows import ReportRow
from app.models.spec import Wire
from app.texts import lasted

sweep = typer.Typer(help="Run the same tasks with several values of one setting, and compare.", no_args_is_help=True)
sweep.callback()(lambda: None)  # a group, although it has one command


@sweep.command()
@takes_options
def resources(
    factors: Annotated[str, typer.Argument(help="Factors such as `1x,3x`: each is the `--kill-at` of a separate run.")],
    *,
    options: SubmissionOptions,
    dataset: Annotated[
        list[str], typer.Option("--dataset", "-d", help="Dataset, as for `megaflow submit`; may be repeated.")
    ],
    name: Annotated[str, typer.Option(help="Name of the runs; each gets its factor as a suffix.")] = "sweep",
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait at most.")] = None,
    json: Json = False,
) -> None:
    """Measure how the kill size of tasks affects a score: one run per factor, compared with the first."""
    values = _values(factors, options)
    submission = options.submission(dataset, name=name)
    with MegaFlow() as flow:
        check = options.check(flow)
        runs = submit_all(flow, [_with(submission, value) for value in values], check=check)
        say(f"{len(runs)} runs of {len(runs[0].handles)} tasks accepted")
        follow(flow, runs, timeout=timeout)
        rows = [report_rows.rows(flow.database, run.id) for run in runs]
    lines = [
        sweep_line(str(run.id), f"{value:g}x", own, rows[0] if own is not rows[0] else ())
        for run, value, own in zip(runs, values, rows, strict=True)
    ]
    if json:
        as_json(lines)
    else:
        _print(lines)


def _values(given: str, options: SubmissionOptions) -> list[float]:
    """Reads the factors. Raises: SpecInvalid."""
    factors = [factor_of(one) for one in given.split(",")]
    if len(factors) < 2 or len(set(factors)) < len(factors):
        raise OptionInvalid(f"expected two or more factors, each once, such as 1x,3x; found {given[:80]!r}")
    if options.kill_at is not None:
        raise OptionInvalid(f"expected no --kill-at beside the factors, found {options.kill_at[:40]!r}; leave it out")
    return factors


def _with(submission: Submission, value: float) -> Submission:
    overrides = submission.overrides.model_copy(update={"kill_at": value})
    return submission.model_copy(update={"overrides": overrides, "name": f"{submission.name}-{value:g}x"})


class SweepLine(Wire):
    """Figures of a run, and its difference to the first run on the tasks that both have scored."""

    run_id: str
    figures: Slice
    tasks: int = 0  # scored in both
    difference: Rate | None = None  # None: no task was scored in both
    mcnemar_p: float | None = None


def sweep_line(run_id: str, name: str, rows: Sequence[ReportRow], first: Sequence[ReportRow] = ()) -> SweepLine:
    """Returns a run's line. first: the rows to compare with; baselines such as `oracle` count as other agents do."""
    figures = slice_of(name, rows)
    both = statistics.paired(_groups(first), _groups(rows)) if first else None
    if both is None:
        return SweepLine(run_id=run_id, figures=figures)
    p = both.mcnemar_p
    return SweepLine(run_id=run_id, figures=figures, tasks=both.tasks, difference=both.difference, mcnemar_p=p)


def _groups(rows: Sequence[ReportRow]) -> dict[str, list[bool]]:
    """Returns results by agent and task: attempts of several agents are not replicas of each other."""
    parts = {agent: groups_of(row for row in rows if row.agent == agent) for agent in {row.agent for row in rows}}
    return {f"{agent} {task}": solved for agent, part in parts.items() for task, solved in part.items()}


_COLUMNS = ("score", "95 %", "killed", "throttled", "out of time", "lost", "difference", "its 95 %", "p", "run")


def _print(lines: list[SweepLine]) -> None:
    table = Table("kill at", *_COLUMNS, right=_COLUMNS[:-1], keys=1)
    for line in lines:
        part = line.figures
        table.add_row(
            part.name,
            "-" if part.rate is None else f"{100 * part.rate.value:.1f} % of {part.scored}",
            _bounds(part.rate),
            "-" if part.memory_kills is None else str(part.memory_kills),
            "-" if part.throttled_s is None else lasted(part.throttled_s),
            str(part.out_of_time),
            str(part.lost_to_infrastructure),
            "-" if line.difference is None else f"{100 * line.difference.value:+.1f} points",
            _bounds(line.difference),
            "-" if line.mcnemar_p is None else f"{line.mcnemar_p:.3g}",
            line.run_id[-12:],
        )
    console.print(table)
    say("killed: processes, for memory; lost: tasks, to infrastructure; difference: to the first line, task by task")


def _bounds(rate: Rate | None) -> str:
    return "-" if rate is None else f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"
