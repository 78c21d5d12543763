"""The picture beside the figures: what a task costs, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # no screen here

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from app.models.outcome import Phase
from bench import timing
from bench.timing import Batch

_COLOURS = [plt.get_cmap("tab20")(number) for number in range(20)]


def main(batches: Sequence[Batch], path: Path) -> None:
    """Left: time per task of every variant, with the rounds as dots. Right: ours, from door to door."""
    widths = sorted({batch.width for batch in batches})
    figure, axes = plt.subplots(2, len(widths), figsize=(7 * len(widths), 8), layout="constrained")
    for column, width in enumerate(widths):
        _costs(axes[0][column], batches, width)
        _doors(axes[1][column], batches, width)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _costs(axis: Axes, batches: Sequence[Batch], width: int) -> None:
    names = list(dict.fromkeys(batch.variant for batch in batches))
    names.sort(key=lambda name: timing.slot_median_s(batches, name, width))
    for place, name in enumerate(names):
        rounds = [batch.slot_s for batch in timing.of(batches, name, width)]
        colour = _COLOURS[6] if name.startswith("bare") else _COLOURS[0]
        axis.barh(place, timing.slot_median_s(batches, name, width), color=colour, height=0.6)
        axis.plot(rounds, [place] * len(rounds), "o", color="black", markersize=4)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("seconds of one slot per task (bar: median, dots: rounds)")
    axis.set_title(f"{width} at a time")
    axis.set_xlim(left=0)


def _doors(axis: Axes, batches: Sequence[Batch], width: int) -> None:
    modes = list(dict.fromkeys(batch.variant for batch in batches if batch.phases))
    found = {mode: timing.phase_medians_s(batches, mode, width) for mode in modes}
    spans = list(
        dict.fromkeys(name for phases in found.values() for name in phases if name not in timing.not_ours(width))
    )
    for place, span in enumerate(spans):
        starts = [sum(found[mode].get(name, 0.0) for name in spans[:place]) for mode in modes]
        lengths = [found[mode].get(span, 0.0) for mode in modes]
        # By the door it leads to: the same colour for the same span in every picture.
        colour = _COLOURS[2 * list(Phase).index(Phase(span.rpartition(" ")[2])) % 19]
        axis.barh(modes, lengths, left=starts, color=colour, height=0.6, label=span)
    axis.set_xlabel("seconds from door to door (medians)")
    axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
