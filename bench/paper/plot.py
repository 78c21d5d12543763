"""The pictures: our curves beside the paper's points, drawn from what was kept and from points.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # no screen here

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.paper import data
from bench.paper.plans import BEYOND, CENTRAL, EPHEMERAL, LATENCY, LATENCY_TASKS, LIMITED, PERSISTENT

COLOURS = {CENTRAL: "tab:orange", EPHEMERAL: "tab:blue", PERSISTENT: "tab:green", LIMITED: "tab:purple"}
_PHASE_COLOURS = ("tab:grey", "tab:olive", "tab:cyan", "tab:orange", "tab:red", "tab:blue", "tab:purple")
_PHASES = ("submission", "scheduling", "boot", "image", "environment", "agent", "rest")

Samples = Mapping[str, Any]


def draw(samples: Samples, folder: Path) -> None:
    """Write paper-figure3.png, -figure4.png, -figure5.png and -beyond.png."""
    for name, make in (("figure3", _scaling), ("figure4", _full), ("figure5", _latency), ("beyond", _beyond)):
        figure = make(samples)
        figure.savefig(folder / f"paper-{name}.png", dpi=110)
        plt.close(figure)


def of(samples: Samples, series: str, figure: str = "") -> list[Any]:
    """The points of a series, by size; of several of one size the first."""
    found = [one for one in samples["points"] if one["series"] == series and one["figure"].startswith(figure)]
    return sorted({one["tasks"]: one for one in reversed(found)}.values(), key=lambda one: one["tasks"])


def _curve(axis: Axes, points: Sequence[Any], name: str, key: str) -> None:
    if not points:
        return
    x = [one["tasks"] for one in points]
    axis.plot(x, [one[key]["mean"] for one in points], "o-", color=COLOURS[name], label=f"here, {name}")
    axis.fill_between(
        x, [one[key]["low"] for one in points], [one[key]["high"] for one in points], color=COLOURS[name], alpha=0.2
    )


def _paper(axis: Axes, figure: str, *, percent_x: bool = False) -> None:
    for series in dict.fromkeys(one.series for one in data.points(figure)):
        found = data.points(figure, series)
        x = [100 * one.x if percent_x else one.x for one in found]
        spread = [[one.middle - one.low for one in found], [one.high - one.middle for one in found]]
        axis.errorbar(
            x, [one.middle for one in found], yerr=spread, fmt="D", markerfacecolor="none", markersize=8,
            color=COLOURS[series], label=f"paper, {series}",
        )  # fmt: skip


def _sizes(axis: Axes, what: str) -> None:
    axis.set_xscale("log")
    axis.set_xlabel("tasks at once")
    axis.set_ylabel(what)
    axis.legend(fontsize="small")


def _scaling(samples: Samples) -> Any:
    figure, (times, costs) = plt.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    for name in (EPHEMERAL, CENTRAL):
        _curve(times, of(samples, name, "figure 3"), name, "total_min")
        _curve(costs, of(samples, name, "figure 3"), name, "cost_usd")
    _paper(times, "3-time")
    _paper(costs, "3-cost")
    times.set_ylim(bottom=0)
    costs.set_yscale("log")
    _sizes(times, "mean time of a task, minutes")
    _sizes(costs, "cost of the job, USD")
    return figure


def _full(samples: Samples) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    for axis, key in zip(axes, ("cpu", "memory"), strict=True):
        for name, curves in samples["utilisation"].items():
            mean, low, high = curves[key]
            x = [100 * (place + 0.5) / len(mean) for place in range(len(mean))]
            axis.plot(x, mean, color=COLOURS[name], label=f"here, {name}")
            axis.fill_between(x, low, high, color=COLOURS[name], alpha=0.2)
        _paper(axis, f"4-{key}", percent_x=True)
        axis.set_xlabel("% of a host's time")
        axis.set_ylabel(f"{key} in use, %")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    return figure


def _latency(samples: Samples) -> Any:
    figure, (bars, starts) = plt.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    found = {name: latency(samples, name) for name in (PERSISTENT, EPHEMERAL, CENTRAL)}
    for place, (name, one) in enumerate(found.items()):
        left = 0.0
        for phase, colour in zip(_PHASES, _PHASE_COLOURS, strict=True):
            minutes = one["phases_min"][phase]["mean"] if one else 0.0
            bars.barh(place, minutes, left=left, color=colour, height=0.5, label=phase if place == 0 else None)
            left += minutes
        bars.plot([data.point("5-latency", name, 1000)], [place], "D", markerfacecolor="none", color="black")
    bars.set_yticks(range(len(found)), list(found))
    bars.set_xlabel("minutes (diamond: the paper's total)")
    bars.legend(fontsize="small")
    for name in (PERSISTENT, EPHEMERAL, LIMITED, CENTRAL):
        _curve(starts, of(samples, name, "" if name == PERSISTENT else "figure 3"), name, "startup_min")
    _paper(starts, "5-startup")
    _sizes(starts, "minutes until the environment is ready")
    return figure


def latency(samples: Samples, series: str) -> Any:
    """The point of figure 5's bars, or None: it was not run."""
    found = [one for one in of(samples, series, LATENCY) if one["tasks"] == LATENCY_TASKS]
    return found[0] if found else next(iter(of(samples, series, LATENCY)), None)


def _beyond(samples: Samples) -> Any:
    figure, axis = plt.subplots(figsize=(10, 4.5), layout="constrained")
    found = [one for one in samples["points"] if one["figure"] == BEYOND]
    names = [one["series"] for one in found]
    axis.barh(names, [one["cost_usd"]["mean"] for one in found], color="tab:blue", height=0.5)
    for series in (EPHEMERAL, CENTRAL):
        axis.axvline(
            data.point("3-cost", series, 2000), color=COLOURS[series], linestyle="--", label=f"paper, {series}"
        )
    axis.axvline(data.point("3-cost", EPHEMERAL, 2000) / 2, color="tab:red", linestyle=":", label="goal")
    axis.set_xlabel("USD for 2,000 tasks")
    axis.legend(fontsize="small")
    return figure
