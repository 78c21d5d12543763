"""The picture of `make train-demo`: reward and submit rate by step, for each seed and the control."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("agg")  # no screen here

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from bench.training.demo import Seed


def training(seeds: Sequence[Seed], path: Path) -> None:
    """Left: mean reward. Right: share submitted, and the policy version's staleness below it."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for seed in seeds:
        steps = [one.step for one in seed.steps]
        look = {"color": "0.5", "linestyle": "--"} if seed.shuffled else {}
        label = "control: shuffled rewards" if seed.shuffled else f"seed {seed.seed}"
        left.plot(steps, [one.reward for one in seed.steps], label=label, **look)
        middle.plot(steps, [one.submitted for one in seed.steps], label=label, **look)
        right.plot(steps, [one.staleness for one in seed.steps], label=label, **look)
    left.axhline(0.9, color="black", linewidth=0.7, linestyle=":")
    left.set(title="reward (mean of 32 attempts)", xlabel="step = policy version", ylim=(-0.6, 1.05))
    middle.set(title="share submitted", xlabel="step", ylim=(0, 1.05))
    right.set(title="staleness at hand-out (versions)", xlabel="step", ylim=(-0.1, 2))
    left.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
