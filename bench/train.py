"""What training costs beside the trainer: experience store, waste, stragglers, steps an hour.

    python -m bench.train                     (all parts, about twenty minutes)
    python -m bench.train --part steps        (one; the others keep what the file has of them)
    python -m bench.train --quick             (small and short, kept apart from the real results)

Parts: `handout` (bench/training/handout.py), `waste` and `groups` (rollouts.py), `steps` (steps.py). PostgreSQL and
Redis are private ones that sync to the disk. Figures stand in results/train.json with every attempt, the picture in
train.png. The workload is synthetic and committed: bench/training/workload.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console

from app.errors import MegaFlowError
from bench import control_record, train_plot
from bench.control_record import Part
from bench.control_system import Say
from bench.record import RESULTS, Row
from bench.training import handout, rollouts, steps

console = Console(stderr=True)
PARTS: dict[str, tuple[Callable[[Say], Part], Callable[[Say], Part]]] = {
    "handout": (partial(handout.measure, handout.Scale()), partial(handout.measure, handout.QUICK)),
    "waste": (partial(rollouts.measure_waste, rollouts.Scale()), partial(rollouts.measure_waste, rollouts.QUICK)),
    "groups": (partial(rollouts.measure_groups, rollouts.Scale()), partial(rollouts.measure_groups, rollouts.QUICK)),
    "steps": (partial(steps.measure, steps.Scale()), partial(steps.measure, steps.QUICK)),
}
"""Each in full and in short."""


def main() -> int:
    """Measure, write, print. The exit code is 0 also when a goal was missed: the file says so."""
    parser = argparse.ArgumentParser(prog="python -m bench.train", description="Measure what training costs.")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small and short: does it work, rather than how fast")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mfb-quick-")) if given.quick else RESULTS
    path = folder / "train.json"
    failed = [name for name in given.part or PARTS if not _run(name, path, quick=given.quick)]
    train_plot.draw(control_record.load(path), path.with_suffix(".png"))
    console.print(f"written: {path}")
    return 1 if failed else 0


def _run(name: str, path: Path, *, quick: bool) -> bool:
    """Measure one part and keep it; False when it could not be measured, and then nothing of it is kept."""
    busy = psutil.cpu_percent(interval=1.0) / 100
    begun = time.monotonic()
    try:
        with console.status(name) as status:
            part = PARTS[name][quick](lambda text: status.update(f"{name}: {text}"))
    except (MegaFlowError, RuntimeError) as error:
        console.print(f"bench: {name}: {error}", markup=False)
        return False
    control_record.keep(path, name, part, busy=busy, took_s=time.monotonic() - begun)
    for item in part.rows:
        print(_line(item), flush=True)
    console.print(f"{name}: others kept {busy:.0%} of the processors busy before, load {os.getloadavg()[0]:.1f} after")
    return True


def _line(item: Row) -> str:
    goal = "" if item.goal is None else f"   goal {item.goal:g}: {'met' if item.holds else 'MISSED'}"
    return f"{item.metric:82} {item.value:>10g} {item.unit}{goal}"


if __name__ == "__main__":
    sys.exit(main())
