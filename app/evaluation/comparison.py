"""Compares two runs task by task, and refuses where something else than the agent or the model differs. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import ReportRefused
from app.evaluation import statistics
from app.evaluation.report import BASELINES, Rate, groups_of, slice_of, versions
from app.ledger.report_rows import ReportRow
from app.models.spec import Wire

__all__ = ["SAME", "Comparison", "compare"]

SAME = ("image", "limits", "resources", "agent")
"""What must be alike for a difference to be one between models, unless it is what is compared."""


class Comparison(Wire):
    """What the second run has over the first, on the tasks that both have scored."""

    first: Rate | None
    second: Rate | None
    tasks: int
    difference: Rate
    mcnemar_p: float
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differs: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]  # what else is not alike
    replicas_needed: int | None = None
    power_difference: float | None = None


def compare(
    first: Sequence[ReportRow],
    second: Sequence[ReportRow],
    *,
    allow: Sequence[str] = (),
    power_difference: float | None = None,
) -> Comparison:
    """allow: those of `SAME` that may differ. power_difference: tell the replicas that show it.

    Raises: ReportRefused: one of the others differs, or no task was scored in both.
    """
    mine = [row for row in first if row.agent not in BASELINES]
    other = [row for row in second if row.agent not in BASELINES]
    for rows, left in ((first, mine), (second, other)):
        if rows and not left:
            agents = ", ".join(sorted({row.agent for row in rows}))
            raise ReportRefused(
                f"expected two runs of agents that ask a model; found one of {agents} alone, which says something about"
                " tasks and not about a model; `megaflow report RUN` has its rates and what is unstable"
            )
    differs = _differences(mine, other)
    refused = {name: both for name, both in differs.items() if name in SAME and name not in allow}
    if refused:
        told = "; ".join(f"{name}: {_few(a)} and {_few(b)}" for name, (a, b) in refused.items())
        raise ReportRefused(
            f"expected runs that differ in the model alone; found {told}; a difference may come from there:"
            f" {' '.join(f'--allow {name}' for name in refused)} compares them all the same"
        )
    found = statistics.paired(groups_of(mine), groups_of(other))
    if found is None:
        raise ReportRefused("expected tasks that both runs have scored; found none: are they of one dataset?")
    difference = Rate.of(found.difference)
    assert difference is not None
    needed = None
    if power_difference is not None:
        needed = statistics.replicas_needed(groups_of(mine), groups_of(other), power_difference)
    return Comparison(
        first=slice_of("first", mine).rate,
        second=slice_of("second", other).rate,
        tasks=found.tasks,
        difference=difference,
        mcnemar_p=found.mcnemar_p,
        only_first=found.only_first,
        only_second=found.only_second,
        differs=differs,
        replicas_needed=needed,
        power_difference=power_difference,
    )


def _differences(
    first: Sequence[ReportRow], second: Sequence[ReportRow]
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """What is not alike; of images, limits and resources only on the tasks of both."""
    both = {row.name for row in first} & {row.name for row in second}
    mine, other = (versions(row for row in rows if row.name in both) for rows in (first, second))
    return {name: (mine[name], other[name]) for name in mine if mine[name] != other[name]}


def _few(values: tuple[str, ...]) -> str:
    return f"{', '.join(values[:3])}{f' and {len(values) - 3} more' if len(values) > 3 else ''}"
