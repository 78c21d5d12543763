"""The picture of `make bench-train`, drawn from what the file holds and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("agg")  # no screen here

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.training.rollouts import GOAL_WASTE
from bench.training.steps import GOAL, MODES

Kept = Mapping[str, Any]
_OURS, _OTHER, _GOAL = "tab:blue", "tab:grey", "tab:red"


def draw(kept: Kept, path: Path) -> None:
    """Draw the parts that were measured."""
    figure, axes = plt.subplots(1, 4, figsize=(20, 4.6), layout="constrained")
    panels: dict[str, Callable[[Axes, Kept], None]] = {
        "handout": _handout,
        "waste": _waste,
        "groups": _groups,
        "steps": _steps,
    }
    for axis, (name, drawn) in zip(axes, panels.items(), strict=True):
        if name in kept:
            drawn(axis, kept[name])
        else:
            axis.set_title(f"{name}: not measured")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _handout(axis: Axes, kept: Kept) -> None:
    rounds = kept["samples"]["passages"]
    rates = {
        "made and\nput on record": [one["samples"] / one["made_s"] for one in rounds],
        "handed out\nand committed": [one["samples"] / one["handed_s"] for one in rounds],
        "one after\nthe other": [one["samples"] / (one["made_s"] + one["handed_s"]) for one in rounds],
    }
    for place, found in enumerate(rates.values()):
        axis.bar(place, median(found), color=_OURS, width=0.55)
        axis.plot([place] * len(found), found, "o", color="black", markersize=4)
    axis.set_xticks(range(len(rates)), list(rates))
    axis.set(title="experience store, one process each", ylabel="samples per second")


def _waste(axis: Axes, kept: Kept) -> None:
    shares = [one for one in kept["rows"] if one["unit"] == "share of rollouts"]
    names = ["repaired alone", "whole group of 16", "whole group of 8\n(worked out)"]
    for place, one in enumerate(shares):
        axis.bar(place, one["value"], color=_OURS if place == 0 else _OTHER, width=0.55)
        axis.text(place, one["value"], f"{one['value']:.1%}", ha="center", va="bottom")
    axis.set_xticks(range(len(shares)), names[: len(shares)])
    axis.axhline(GOAL_WASTE, color=_GOAL, linestyle="--", label="goal: less than")
    axis.set(title="rollouts wasted at 5 % faults", ylabel="share of rollouts")
    axis.legend()


def _groups(axis: Axes, kept: Kept) -> None:
    looks = {"stragglers": "-", "many_stragglers": ":"}
    found: dict[tuple[str, str], list[float]] = {}
    for step in kept["samples"]["steps"]:
        found.setdefault((step["workload"], step["rules"]), []).extend(step["group_s"])
    for (workload, rules), times in found.items():
        ordered = sorted(times)
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        colour = _OTHER if rules == "all replicas" else _OURS
        label = f"{rules}, {'5 %' if workload == 'stragglers' else '20 % (adverse)'}"
        axis.plot(ordered, shares, looks[workload], color=colour, label=label)
    axis.set(title="groups complete, stragglers 8 times as long", xlabel="seconds since the first claim")
    axis.set_ylabel("share of groups")
    axis.set_xlim(left=0)
    axis.legend(fontsize=8, loc="lower right")


def _steps(axis: Axes, kept: Kept) -> None:
    trainings = kept["samples"]["trainings"]
    kinds = sorted({one["train_s"] for one in trainings}, reverse=True)
    for offset, train_s in enumerate(kinds):
        rates = {
            mode: [_per_hour(one) for one in trainings if (one["mode"], one["train_s"]) == (mode, train_s)]
            for mode in MODES
        }
        for place, mode in enumerate(MODES):
            ratios = [mine / sync for mine, sync in zip(rates[mode], rates["sync"], strict=True)]
            colour = _OURS if offset == 0 else _OTHER
            label = ("trainer: a third of a sync step" if offset == 0 else "adverse: a tenth") if place == 0 else None
            axis.bar(place + 0.35 * offset, median(ratios), color=colour, width=0.33, label=label)
            axis.plot([place + 0.35 * offset] * len(ratios), ratios, "o", color="black", markersize=4)
    axis.set_xticks([place + 0.17 for place in range(len(MODES))], list(MODES))
    axis.axhline(GOAL, color=_GOAL, linestyle="--", label="goal")
    axis.set(title="steps an hour to sync's, 1,024 rollouts a step", ylabel="ratio")
    axis.legend(fontsize=8)


def _per_hour(one: Kept) -> float:
    live_s = one["live_s"]
    return float(3600 * (len(live_s) - 1) / (live_s[-1] - live_s[0]))
