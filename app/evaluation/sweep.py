"""Lays runs beside each other that differ in one setting: what that setting does to the score. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from app.evaluation import statistics
from app.evaluation.report import Rate, Slice, groups_of, slice_of
from app.ledger.report_rows import ReportRow
from app.models.spec import Wire

__all__ = ["SweepLine", "sweep_line"]


class SweepLine(Wire):
    """One run's figures, and what it has over the first run on the tasks that both have scored."""

    run_id: str
    figures: Slice
    tasks: int = 0  # of both
    difference: Rate | None = None  # None: no task was scored in both
    mcnemar_p: float | None = None


def sweep_line(run_id: str, name: str, rows: Sequence[ReportRow], first: Sequence[ReportRow] = ()) -> SweepLine:
    """first: the rows that it is compared with; baselines such as `oracle` are counted as other agents are."""
    figures = slice_of(name, rows)
    both = statistics.paired(_groups(first), _groups(rows)) if first else None
    if both is None:
        return SweepLine(run_id=run_id, figures=figures)
    difference = Rate.of(both.difference)
    return SweepLine(run_id=run_id, figures=figures, tasks=both.tasks, difference=difference, mcnemar_p=both.mcnemar_p)


def _groups(rows: Sequence[ReportRow]) -> dict[str, list[bool]]:
    """By agent and task: attempts of several agents are no replicas of each other."""
    parts = {agent: groups_of(row for row in rows if row.agent == agent) for agent in {row.agent for row in rows}}
    return {f"{agent} {task}": solved for agent, part in parts.items() for task, solved in part.items()}
