"""The environments measured: ours beside its peers and the bare engine, interleaved on the same image and box.

    python -m bench.environments                    (all parts, 50 minutes)
    python -m bench.environments --part step        (one; may be repeated; the others keep what the file has of them)
    python -m bench.environments --only Harbor      (ours and this one; may be repeated)
    python -m bench.environments --quick            (small and short, kept apart from the real results)

Figures stand in results/environments.json, pictures in environments-<part>.png. Every contender works in a process of
its own, with its own packages, and times itself there. Ratios of one run are what to trust on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil
from docker.errors import APIError
from rich.console import Console
from rich.table import Table

from app.errors import MegaFlowError
from app.host.engine import engine_of
from app.settings import PREFIX, Settings
from app.stack import base_image, engine
from bench import control_record
from bench.control_record import Part
from bench.environments import agent, creations, files, goals, plot, setups, start, step, tax, thousand, warm
from bench.environments.contenders import BARE, CONTENDERS, OURS, RAW, Fixtures
from bench.environments.crew import Crew, Say, books, gathered
from bench.record import RESULTS

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """One part: how it is measured, in full and in short."""

    full: Callable[[Crew], Part]
    quick: Callable[[Crew], Part]


def _entry(module: Any) -> Entry:
    return Entry(partial(module.measure, module.Scale()), partial(module.measure, module.QUICK))


PARTS = {
    "start": _entry(start),
    "step": _entry(step),
    "creations": _entry(creations),
    "files": _entry(files),
    "agent": _entry(agent),
    "thousand": _entry(thousand),
    "warm": _entry(warm),
    "setup": _entry(setups),
    "tax": _entry(tax),
}


def main() -> int:
    """Measure, write, print. The exit code is 0 also when a goal was missed: the file says so."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleared away then, too
    folder = Path(tempfile.mkdtemp(prefix="mfb-quick-")) if given.quick and given.out == RESULTS else given.out
    path = folder / "environments.json"
    names = [name for name in CONTENDERS if not given.only or name in (*OURS, RAW, BARE, *given.only)]
    try:
        with console.status("the engine and the image") as status:
            say = partial(_say, status)
            with _fixtures(say) as fixtures, gathered(fixtures, names, say) as crew:
                failed = [name for name in given.part or PARTS if not _run(name, crew, path, status, quick=given.quick)]
    except (MegaFlowError, RuntimeError) as error:
        console.print(f"bench: {error}", markup=False)
        return getattr(error, "exit_code", 1)
    _conclude(path)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.environments", description="Measure the environments.")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; may be repeated")
    parser.add_argument("--only", action="append", choices=list(CONTENDERS), help="beside ours, only this peer")
    parser.add_argument("--quick", action="store_true", help="small and short: does it work, rather than how fast")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of environments.json and its pictures")
    return parser.parse_args()


def _say(status: Any, text: str) -> None:
    """On a terminal the line that is being worked on; what went wrong is printed for good."""
    status.update(text[:140])
    if "falls out" in text or "cannot be measured" in text:
        console.print(text[:600], markup=False, highlight=False)


@contextmanager
def _fixtures(say: Say) -> Iterator[Fixtures]:
    """The engine, the image that all use, and a short folder; nothing of the run is left afterwards."""
    for name in [name for name in os.environ if name.startswith(PREFIX) and name != f"{PREFIX}DOCKER_URL"]:
        del os.environ[name]  # a user's own installation must not be measured, nor touched
    folder = Path(tempfile.mkdtemp(prefix="mfb-"))
    folder.chmod(0o711)
    settings = Settings(home=folder / "h")
    try:
        engine.ensure_engine(settings, may_install=True, report=say)
        base_image.ensure_base_image(settings, report=say)
        os.environ["DOCKER_HOST"] = engine.engine_url(settings)  # for the peers
        with _in_memory() as memory:
            fixtures = Fixtures(settings, settings.base_image, folder, memory)
            try:
                yield fixtures
            finally:
                _clear(fixtures)
    finally:
        engine.stop_engine(settings)  # only one that was started here
        rmtree(folder, ignore_errors=True)


@contextmanager
def _in_memory() -> Iterator[Path | None]:
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mfb-", dir=place) as folder:
        yield Path(folder)


def _clear(fixtures: Fixtures) -> None:
    """What contenders left whose processes were killed, and the image that was made for one of them."""
    connected = engine_of(fixtures.settings)
    for container in books(fixtures.folder):
        connected.remove(container)
    with suppress(APIError):
        connected.api.remove_image(fixtures.rex_image)


def _run(name: str, crew: Crew, path: Path, status: Any, *, quick: bool) -> bool:
    """Measure one part and keep it; False when it could not be measured, and then nothing of it is kept."""
    busy = psutil.cpu_percent(interval=1.0 if quick else 3.0) / 100
    begun = time.monotonic()
    crew.begin()
    crew.say = lambda text: _say(status, f"{name}: {text}")
    try:
        part = (PARTS[name].quick if quick else PARTS[name].full)(crew)
    except (MegaFlowError, RuntimeError, KeyError) as error:
        console.print(f"bench: {name}: {type(error).__name__}: {error}", markup=False)
        return False
    control_record.keep(path, name, part, busy=busy, took_s=time.monotonic() - begun)
    plot.draw(control_record.load(path)[name]["samples"], path.with_name(f"environments-{name}.png"))
    _show(part)
    console.print(f"{name}: others kept {busy:.0%} of the processors busy before, load {os.getloadavg()[0]:.1f} after")
    return True


def _show(part: Part) -> None:
    table = Table("metric", "value", "unit", "goal", "holds", header_style="bold", pad_edge=False)
    for item in part.rows:
        if not item.metric.endswith(": n"):  # it stands in the file
            table.add_row(item.metric, _text(item.value)[:90], item.unit, _text(item.goal), _text(item.holds))
    _out().print(table)


def _conclude(path: Path) -> None:
    """All goals of all parts that the file has, and who could not be measured."""
    kept = control_record.load(path)
    images = control_record.load(path.with_name("images.json"))  # `python -m bench.images`: simulated, apart from here
    kept |= {f"images: {name}": told for name, told in images.items()}
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
    return Console(width=None if sys.stdout.isatty() else 160)


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
