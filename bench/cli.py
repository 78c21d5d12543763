"""How long the command takes to start, beside `python -c "import typer"`, which any command line of its kind pays.

python -m bench.cli     (writes results/cli.json)

The starts are interleaved, so that a busy machine slows all of them down; the median of each is compared. PostgreSQL
is a server of its own, with no runs in it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.control_system import servers
from bench.record import machine, row, write

ROUNDS = 15
COMMAND = str(Path(sys.executable).with_name("megaflow"))
PROGRAMS = {
    "import typer": [sys.executable, "-c", "import typer"],
    "--help": [COMMAND, "--help"],
    "--version": [COMMAND, "--version"],
    "submit --help": [COMMAND, "submit", "--help"],
    "runs": [COMMAND, "runs"],
}
GOALS = {"--help": 2.5, "runs": 5.0}
"""Times as long as the first at most."""


def measured(environment: dict[str, str], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of each program's start, the median of `rounds` interleaved ones after a first that counts for none."""
    took: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(rounds + 1):
        for name, command in PROGRAMS.items():
            begun = time.perf_counter()
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)  # noqa: S603  our own
            if number:
                took[name].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def main() -> None:
    """Measure, print, write."""
    with servers() as running, running.fresh_database() as url:
        found = measured({**os.environ, "MEGAFLOW_DATABASE_URL": url})
    base = found["import typer"]
    rows = [row(f"{name}: start", seconds * 1000, "ms") for name, seconds in found.items()]
    for name, seconds in found.items():
        if seconds is not base:
            rows.append(row(f"{name} to import typer", seconds / base, "x", goal=GOALS.get(name), better="less"))
    for one in rows:
        goal = "" if one.goal is None else f"  (at most {one.goal:g}: {'yes' if one.holds else 'NO'})"
        print(f"{one.metric:32} {one.value:8.4g} {one.unit}{goal}")
    print(write("cli", [machine({}), *rows]))


if __name__ == "__main__":
    main()
