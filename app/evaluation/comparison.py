"""Compares two runs task by task. Refuses when anything but the model differs, unless it is allowed. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import ReportRefused
from app.evaluation import statistics
from app.evaluation.report import BASELINES, groups_of, slice_of, versions
from app.evaluation.statistics import PairedDifference, Rate
from app.ledger.report_rows import ReportRow

SAME = ("image", "limits", "resources", "agent", "prompt", "tests", "grader")
"""Versions that must be alike for a difference to come from the model, unless one of them is what is compared."""


class Comparison(PairedDifference):
    """Difference of the second run to the first, on the tasks that both have scored."""

    first: Rate | None
    second: Rate | None
    by_majority: bool  # with replicas: flips and `mcnemar_p` count each task once, as solved in more than half of them
    differs: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]  # the other differences
    replicas_needed: int | None = None
    power_difference: float | None = None


def compare(
    first: Sequence[ReportRow],
    second: Sequence[ReportRow],
    *,
    allow: Sequence[str] = (),
    power_difference: float | None = None,
) -> Comparison:
    """Compares two runs. allow: names in `SAME` that may differ. power_difference: computes the replicas that show it.

    Raises: ReportRefused: versions differ, a run has several agents or only baselines, no task was scored in both.
    """
    first_rows = [row for row in first if row.agent not in BASELINES]
    second_rows = [row for row in second if row.agent not in BASELINES]
    for rows, left in ((first, first_rows), (second, second_rows)):
        if rows and not left:
            agents = ", ".join(sorted({row.agent for row in rows}))
            raise ReportRefused(
                f"expected two runs of agents that ask a model; found one of {agents} alone, which says something about"
                " tasks and not about a model; `megaflow report RUN` has its rates and what is unstable"
            )
    for which, rows in (("first", first_rows), ("second", second_rows)):
        if len(names := sorted({row.agent for row in rows})) > 1:
            raise ReportRefused(
                f"expected runs of one agent each, whose attempts at a task are replicas; found {', '.join(names)} in"
                f" the {which}: submit a run for each agent; `megaflow report RUN` has the rate of each"
            )
    differs = _differences(first_rows, second_rows)
    refused = {name: both for name, both in differs.items() if name in SAME and name not in allow}
    if refused:
        details = "; ".join(f"{name}: {_few(a)} and {_few(b)}" for name, (a, b) in refused.items())
        raise ReportRefused(
            f"expected runs that differ in the model alone; found {details}; a difference may come from there:"
            f" {' '.join(f'--allow {name}' for name in refused)} compares them all the same"
        )
    before, now = groups_of(first_rows), groups_of(second_rows)
    result = statistics.paired(before, now)
    if result is None:
        raise ReportRefused(_none_in_common(before, now))
    needed = None
    if power_difference is not None:
        needed = statistics.replicas_needed(before, now, power_difference)
    by_majority = any(len(runs[task]) > 1 for runs in (before, now) for task in before.keys() & now.keys())
    return Comparison(
        **dict(result),
        first=slice_of("first", first_rows).rate,
        second=slice_of("second", second_rows).rate,
        by_majority=by_majority,
        differs=differs,
        replicas_needed=needed,
        power_difference=power_difference,
    )


def _none_in_common(before: statistics.Groups, now: statistics.Groups) -> str:
    without = [which for which, groups in (("first", before), ("second", now)) if not groups]
    why = "are they of one dataset?"
    if without:
        why = f"the {' and the '.join(without)} has no score of a model; `megaflow report RUN` says why"
    return f"expected tasks that both runs have scored; found none: {why}"


def _differences(
    first: Sequence[ReportRow], second: Sequence[ReportRow]
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Returns the versions that differ on common tasks; of grader, image and agent only where both were graded."""
    both = {row.name for row in first} & {row.name for row in second}
    first_versions, second_versions = (versions(row for row in rows if row.name in both) for rows in (first, second))
    graded = [{row.name for row in rows if row.verdict.get("counts")} for rows in (first, second)]
    for current, rows, others in ((first_versions, first, graded[1]), (second_versions, second, graded[0])):
        of_graded = versions(row for row in rows if row.verdict.get("counts") and row.name in others)
        current |= {name: of_graded[name] for name in ("grader", "image", "agent")}  # an early loss may have none
    return {
        name: (first_versions[name], second_versions[name])
        for name in first_versions
        if first_versions[name] != second_versions[name]
    }


def _few(values: tuple[str, ...]) -> str:
    return f"{', '.join(values[:3])}{f' and {len(values) - 3} more' if len(values) > 3 else ''}"
