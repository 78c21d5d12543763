"""The control plane measured: enqueue, dispatch, ten thousand at once (and fifty), bursts, reaction, fairness.

    python -m bench.control                     (all parts, about twenty minutes)
    python -m bench.control --part enqueue      (one; the others keep what the file has of them)
    python -m bench.control --quick             (small and short, kept apart from the real results)

Figures stand in results/control.json, pictures in control-<part>.png. PostgreSQL and Redis are private ones that sync
to the disk; instances are simulated and everything between them and the producer is real. Ratios of one run are what
to trust on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from app.errors import MegaFlowError
from bench import (
    control_burst,
    control_dispatch,
    control_enqueue,
    control_fairness,
    control_hold,
    control_plot,
    control_reaction,
    control_record,
)
from bench.control_record import Part
from bench.control_system import Say
from bench.record import RESULTS, Row

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """One part: how it is measured, in full and in short."""

    full: Callable[[Say], Part]
    quick: Callable[[Say], Part]


def _entry(module: Any) -> Entry:
    return Entry(partial(module.measure, module.Scale()), partial(module.measure, module.QUICK))


PARTS = {
    "enqueue": _entry(control_enqueue),
    "dispatch": _entry(control_dispatch),
    "hold": _entry(control_hold),
    "reaction": _entry(control_reaction),
    "fairness": _entry(control_fairness),
    "crowd": Entry(
        partial(control_hold.measure, control_hold.CROWD), partial(control_hold.measure, control_hold.QUICK)
    ),
    "burst": _entry(control_burst),
}


def main() -> int:
    """Measure, write, print. The exit code is 0 also when a goal was missed: the file says so."""
    given = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="mfb-quick-")) if given.quick and given.out == RESULTS else given.out
    path = folder / "control.json"
    failed = [name for name in given.part or PARTS if not _run(name, PARTS[name], path, quick=given.quick)]
    console.print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.control", description="Measure the control plane.")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small and short: does it work, rather than how fast")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of control.json and its pictures")
    return parser.parse_args()


def _run(name: str, entry: Entry, path: Path, *, quick: bool) -> bool:
    """Measure one part and keep it; False when it could not be measured, and then nothing of it is kept."""
    busy = psutil.cpu_percent(interval=1.0 if quick else 3.0) / 100
    begun = time.monotonic()
    try:
        with console.status(name) as status:
            part = (entry.quick if quick else entry.full)(lambda text: status.update(f"{name}: {text}"))
    except (MegaFlowError, RuntimeError) as error:
        console.print(f"bench: {name}: {error}", markup=False)
        return False
    control_record.keep(path, name, part, busy=busy, took_s=time.monotonic() - begun)
    control_plot.draw(name, control_record.load(path)[name]["samples"], path.with_name(f"control-{name}.png"))
    _show(part.rows)
    console.print(f"{name}: others kept {busy:.0%} of the processors busy before, load {os.getloadavg()[0]:.1f} after")
    return True


def _show(rows: list[Row]) -> None:
    table = Table("metric", "value", "unit", "goal", "holds", header_style="bold", pad_edge=False)
    for item in rows:
        table.add_row(item.metric, f"{item.value:g}", item.unit, _text(item.goal), _text(item.holds))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _text(value: float | bool | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
