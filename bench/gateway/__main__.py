"""The model gateway measured: ours beside LiteLLM's proxy and the bare engine, interleaved on one box.

    python -m bench.gateway                     (all parts, about half an hour)
    python -m bench.gateway --part overhead     (one; may be repeated; the others keep what the file has of them)
    python -m bench.gateway --without LiteLLM   (or --without MegaFlow)
    python -m bench.gateway --rounds 2          (instead of five)
    python -m bench.gateway --quick             (small and short, kept apart from the real results)

Figures stand in results/gateway.json, pictures in gateway-<part>.png. Ratios of one run are what to trust on a busy
machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from app.errors import MegaFlowError
from bench import control_record
from bench.control_record import Part
from bench.control_system import forget_installation
from bench.environments import goals, plot
from bench.gateway import admission, contenders, idle, memory, overhead, rollout, saturation, stream
from bench.gateway.contenders import OURS, PROXIES
from bench.gateway.crew import Crew, Say
from bench.gateway.programs import part
from bench.record import RESULTS

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """One part: how it is measured, in full and in short."""

    measure: Callable[[Any, Any], Part]
    full: Any
    quick: Any

    def scale(self, *, quick: bool, rounds: int | None) -> Any:
        """Not every part goes by rounds."""
        chosen = self.quick if quick else self.full
        return replace(chosen, rounds=rounds) if rounds and hasattr(chosen, "rounds") else chosen


def _entry(module: Any) -> Entry:
    return Entry(module.measure, module.Scale(), module.QUICK)


ON_THE_CREW = {
    "overhead": _entry(overhead),
    "saturation": _entry(saturation),
    "stream": _entry(stream),
    "idle": _entry(idle),
    "memory": _entry(memory),
}
"""Parts that put load on running gateways."""
BY_THEMSELVES = {"rollout": _entry(rollout), "programs": _entry(part), "admission": _entry(admission)}
PARTS = (*ON_THE_CREW, *BY_THEMSELVES)


def main() -> int:
    """Measure, write, print. The exit code is 0 also when a goal was missed: the file says so."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleared away then, too
    forget_installation()
    folder = Path(tempfile.mkdtemp(prefix="mfb-quick-")) if given.quick and given.out == RESULTS else given.out
    path = folder / "gateway.json"
    wanted = given.part or list(PARTS)
    names = tuple(name for name in PROXIES if name not in (given.without or ()))
    done: list[bool] = []
    with console.status("gateway") as status:
        say = partial(_say, status)
        if chosen := [name for name in wanted if name in ON_THE_CREW]:
            with _crew(names, say) as crew:
                done += [_run(name, ON_THE_CREW[name], crew, path, given) for name in chosen]
        done += [_run(name, entry, say, path, given) for name, entry in BY_THEMSELVES.items() if name in wanted]
    _conclude(path)
    return 0 if all(done) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description="Measure the model gateway.")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated")
    parser.add_argument("--without", action="append", choices=PROXIES, help="leave this one out; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small and short: does it work, rather than how fast")
    parser.add_argument("--rounds", type=int, help="of each part, instead of its own number")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gateway.json and its pictures")
    return parser.parse_args()


def _say(status: Any, text: str) -> None:
    """On a terminal the line that is being worked on; what went wrong is printed for good."""
    status.update(text[:140])
    if "falls out" in text or "cannot be measured" in text:
        console.print(text[:900], markup=False, highlight=False)


@contextmanager
def _crew(names: tuple[str, ...], say: Say) -> Iterator[Crew]:
    folder = Path(tempfile.mkdtemp(prefix="mfb-"))
    try:
        with contenders.gathered(names, folder, say) as (present, absent):
            crew = Crew(present, absent, folder, say, contenders.versions())
            crew.warm()
            yield crew
    finally:
        rmtree(folder, ignore_errors=True)


def _run(name: str, entry: Entry, fixture: Crew | Say, path: Path, given: argparse.Namespace) -> bool:
    """Measure one part and keep it; False when it could not be measured, and then nothing of it is kept."""
    busy = psutil.cpu_percent(interval=1.0 if given.quick else 3.0) / 100
    begun = time.monotonic()
    if isinstance(fixture, Crew):
        fixture.begin()
    try:
        part = entry.measure(entry.scale(quick=given.quick, rounds=given.rounds), fixture)
    except (MegaFlowError, RuntimeError, KeyError) as error:
        console.print(f"bench: {name}: {type(error).__name__}: {error}", markup=False)
        return False
    control_record.keep(path, name, part, busy=busy, took_s=time.monotonic() - begun)
    plot.draw(control_record.load(path)[name]["samples"], path.with_name(f"gateway-{name}.png"), ours=(OURS,))
    _show(part)
    console.print(f"{name}: others kept {busy:.0%} of the processors busy before, load {os.getloadavg()[0]:.1f} after")
    return True


def _show(part: Part) -> None:
    table = Table("metric", "value", "unit", "goal", "holds", header_style="bold", pad_edge=False)
    for item in part.rows:
        table.add_row(item.metric, _text(item.value)[:120], item.unit, _text(item.goal), _text(item.holds))
    _out().print(table)


def _conclude(path: Path) -> None:
    """All goals of all parts that the file has."""
    kept = control_record.load(path)
    table = Table("part", "goal of", "value", "goal", "unit", "holds", header_style="bold", pad_edge=False)
    for verdict in goals.verdicts(kept):
        holds = "met" if verdict.holds else "MISSED"
        table.add_row(verdict.part, verdict.metric, _text(verdict.value), _text(verdict.goal), verdict.unit, holds)
    _out().print(table)
    for name, reason in goals.unmeasured(kept):
        _out().print(f"not measured: {name}: {reason}", markup=False, highlight=False)
    console.print(goals.summary(kept))
    console.print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _out() -> Console:
    return Console(width=None if sys.stdout.isatty() else 170)


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
