"""The pictures beside the figures: bars on a logarithmic scale, drawn from what the file holds and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # no screen here

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from bench.environments.contenders import OURS

OURS_COLOUR, PEER_COLOUR, GOAL_COLOUR = "tab:blue", "tab:grey", "tab:red"

Samples = Mapping[str, Any]


def draw(samples: Samples, path: Path, *, ours: Collection[str] = OURS) -> None:
    """One row of bars for each contender, one panel for each quantity; those that begin like one of `ours` are ours."""
    panels = [panel for panel in samples["panels"] if panel["bars"]]
    if not panels:
        return
    columns = 2 if len(panels) == 4 else len(panels)
    height = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(7 * columns, 4.5 * height + 0.5), layout="constrained", squeeze=False
    )
    for axis, panel in zip(axes.flat, panels, strict=True):
        _panel(axis, panel, tuple(ours))
    notes = {name: reason for panel in panels for name, reason in panel["notes"].items()}
    if notes:
        lines = [f"not measured: {name}: {reason.splitlines()[0][:110]}" for name, reason in notes.items()]
        figure.supxlabel("\n".join(lines), fontsize="small", color="dimgrey")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: Axes, panel: Samples, ours: tuple[str, ...]) -> None:
    """The best on top."""
    shown = {name: values for name, values in panel["bars"].items() if values[0] > 0}
    names = sorted(shown, key=lambda name: shown[name][0], reverse=panel["unit"] != "1/s")
    for place, name in enumerate(names):
        values, colour = shown[name], OURS_COLOUR if name.startswith(ours) else PEER_COLOUR
        axis.barh(place, values[0], color=colour, height=0.6)
        axis.plot(values[1:], [place] * len(values[1:]), "|", color="black", markersize=14)
        axis.annotate(f"  {float(f'{values[0]:.3g}'):,g}", (max(values), place), va="center", fontsize="small")
    axis.set_yticks(range(len(names)), names)
    axis.set_xscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.margins(x=0.15)
    ends = any(len(values) > 1 for values in shown.values())
    axis.set_xlabel(f"{panel['unit']} (bar: p50, line: p99)" if ends else panel["unit"])
    axis.set_title(panel["title"])
    if panel["goal"] is not None:
        axis.axvline(panel["goal"], color=GOAL_COLOUR, linestyle="--")
        axis.annotate(
            "goal", (panel["goal"], 1.0), xycoords=("data", "axes fraction"), color=GOAL_COLOUR, fontsize="small"
        )
