"""What `auto` is judged on: workloads.json beside this file.

python -m bench.auto.workloads     (writes the file again, the same bytes)

Synthetic. A mixed job of six hours: single tasks that come one by one, three minutes each, and three batches of a
hundred tasks of ten minutes, all accepted at once. In `adverse` a batch comes one by one over ten minutes, so that the
policy never sees the crowd, and the policy is told the opposite: that single tasks take ten minutes, those of batches
three.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from app.models.spec import Mode
from app.simulation.virtual import VirtualTask

FILE = Path(__file__).with_name("workloads.json")
_HOURS_S, _EVERY_S, _BATCHES, _BATCH = 6 * 3600.0, 300.0, 3, 100
_SINGLE_S, _BATCH_S = 180.0, 600.0
SEEDS = (1, 2, 3)


def load() -> dict[str, list[VirtualTask]]:
    """Every committed workload by its name, as tasks of mode `auto`."""
    found = json.loads(FILE.read_text())
    return {
        name: [
            VirtualTask(arrival_s, dict.fromkeys(_MODES, held_s), expected_s=dict.fromkeys(_MODES, expected_s))
            for arrival_s, held_s, expected_s in rows
        ]
        for name, rows in found.items()
    }


_MODES = (Mode.EPHEMERAL, Mode.PERSISTENT)


def make() -> dict[str, list[tuple[float, float, float]]]:
    """The rows of the file: arrival, time in a slot, what is expected of it; seconds."""
    mixed = {f"mixed, seed {seed}": _mixed(seed) for seed in SEEDS}
    swapped = {_SINGLE_S: _BATCH_S, _BATCH_S: _SINGLE_S}
    adverse = [(at, held_s, swapped[told_s]) for at, held_s, told_s in _mixed(SEEDS[0], spread_s=600.0)]
    return {**mixed, "adverse": adverse}


def _mixed(seed: int, spread_s: float = 0.0) -> list[tuple[float, float, float]]:
    dice = random.Random(seed)
    rows = []
    at = dice.expovariate(1 / _EVERY_S)
    while at < _HOURS_S:
        rows.append((at, dice.lognormvariate(0, 0.5) * _SINGLE_S, _SINGLE_S))
        at += dice.expovariate(1 / _EVERY_S)
    for _ in range(_BATCHES):
        at = dice.uniform(0.05, 0.9) * _HOURS_S
        for _ in range(_BATCH):
            rows.append((at + spread_s * dice.random(), dice.lognormvariate(0, 0.4) * _BATCH_S, _BATCH_S))
    return sorted((round(at, 1), round(held_s, 1), told_s) for at, held_s, told_s in rows)


if __name__ == "__main__":
    lines = ",\n".join(f'"{name}": {json.dumps(rows)}' for name, rows in make().items())
    FILE.write_text(f"{{\n{lines}\n}}\n")
    sys.stdout.write(f"{FILE}\n")
