"""Figures 3, 4 and 5 of the paper on the real control plane, and what can be had beyond them.

    python -m bench.paper               (all, about 18 minutes; results/paper.json, paper-*.png, docs/paper.md)
    python -m bench.paper --quick       (small and short, kept apart from the real results)
    python -m bench.paper --series central    (only points whose series begins so; the others are kept)
    python -m bench.paper --page        (only the page and the pictures again, of what was kept)

PostgreSQL, Redis, dispatcher and leases are real, instances are simulated: with phases as measured here
(calibration.json, `python -m bench.paper.calibrate`), the paper's hardware and the rest as named in assumptions.toml.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from app.errors import MegaFlowError
from bench import control_record
from bench.control_record import Part
from bench.control_system import System
from bench.paper import data, figures, page, plans, plot, point
from bench.paper.data import World
from bench.paper.plans import Job
from bench.record import RESULTS, Row, row

console = Console(stderr=True)
PART = "figures"
GOAL_USD = 0.5
"""Of the paper's cost at 2,000 tasks."""


def main() -> int:
    """Measure, write, draw. The exit code is 0 also when a goal was missed: the file says so."""
    given = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="mfb-quick-")) if given.quick else RESULTS
    path = folder / "paper.json"
    try:
        if not given.page:
            _measure(path, given.series or [""], quick=given.quick)
    except (MegaFlowError, RuntimeError) as error:
        console.print(f"bench: {error}", markup=False)
        return getattr(error, "exit_code", 1)
    kept = control_record.load(path)[PART]
    plot.draw(kept["samples"], folder)
    target = folder / "paper.md" if given.quick else page.PAGE
    target.write_text(page.page(kept))
    console.print(f"written: {path}, {target}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description="The paper's figures.")
    parser.add_argument("--quick", action="store_true", help="small and short: does it work, rather than what is so")
    parser.add_argument("--series", action="append", help="only points whose name begins so; the others are kept")
    parser.add_argument("--page", action="store_true", help="write page and pictures of what was kept")
    return parser.parse_args()


def _measure(path: Path, series: list[str], *, quick: bool) -> None:
    busy, begun = psutil.cpu_percent(interval=1.0) / 100, time.monotonic()
    world = data.world()
    with console.status("starting") as status, point.stack() as system:
        jobs = [job for job in plans.jobs(world, quick=quick) if job.series.startswith(tuple(series))]
        found, curves = _run_all(system, jobs, world, status.update)
    if series != [""]:
        found, curves = _with_kept(control_record.load(path)[PART]["samples"], found, curves)
    samples = {"points": found, "utilisation": curves, "world": asdict(world)}
    part = Part(_rows(found), samples)
    control_record.keep(path, PART, part, busy=busy, took_s=time.monotonic() - begun)


def _run_all(
    system: System, jobs: list[Job], world: World, say: Callable[[str], None]
) -> tuple[list[Any], dict[str, Any]]:
    """The summaries of all points by figure, and the curves of figure 4."""
    found: list[Any] = []
    curves: dict[str, Any] = {}
    for number, job in enumerate(jobs):
        say(f"{number + 1} of {len(jobs)}: {job.series}, {job.tasks} tasks ({job.figure})")
        outcome = point.run(system, job.plan, world, number)
        found.append({"figure": job.figure, "series": job.series, **asdict(figures.summary(outcome, job.tasks))})
        if job.utilisation:
            curves[job.series] = figures.utilisation(outcome, world)
        latest = found[-1]
        console.print(
            f"{job.figure} {job.series} {job.tasks}: {latest['total_min']['mean']:.1f} min,"
            f" {latest['cost_usd']['mean']:.2f} USD, lost {latest['lost']}, {outcome.wall_s:.0f} s"
        )
    return found, curves


def _with_kept(kept: dict[str, Any], found: list[Any], curves: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What was kept, with the new points in the places of their earlier selves."""

    def name(one: dict[str, Any]) -> tuple[Any, ...]:
        return one["figure"], one["series"], one["tasks"]

    new = {name(one): one for one in found}
    return [new.get(name(one), one) for one in kept["points"]], {**kept["utilisation"], **curves}


def _rows(found: list[Any]) -> list[Row]:
    rows: list[Row] = [
        row("tasks lost in all points", sum(one["lost"] for one in found), "tasks", goal=0, better="less")
    ]
    for one in found:
        at = f"{one['figure']}, {one['series']}, {one['tasks']} tasks"
        rows.append(row(f"{at}: total time", one["total_min"]["mean"], "min"))
        rows.append(row(f"{at}: start-up", one["startup_min"]["mean"], "min"))
        whole = one["figure"] == plans.BEYOND and one["series"].startswith(plans.WHOLE)
        most = GOAL_USD * data.point("3-cost", "ephemeral", 2000) if whole else None
        rows.append(row(f"{at}: cost", one["cost_usd"]["mean"], "USD", goal=most, better="less"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
