"""Part 8, setup: 64 tasks of 16 replicas, each with a set-up of 20 seconds (shortened: see `FACTOR`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.control_record import Part
from bench.environments.contenders import OURS
from bench.environments.crew import Crew
from bench.environments.figures import Panel, bars, missing, spread
from bench.record import Row, row

SETUP_S = 20.0
FACTOR = 50.0
"""The set-up sleeps a fiftieth of the issue's 20 s: what counts is how often it runs."""
WIDTH = 16


@dataclass(frozen=True, slots=True)
class Scale:
    tasks: int = 64
    replicas: int = 16


QUICK = Scale(tasks=2, replicas=3)


def measure(scale: Scale, crew: Crew) -> Part:
    found: dict[str, dict[str, Any]] = {}
    for _, name in crew.turns(1, OURS):
        shape = {"tasks": scale.tasks, "replicas": scale.replicas, "width": WIDTH, "setup_s": SETUP_S / FACTOR}
        if (told := crew.ask(name, "setups", timeout_s=1800.0, **shape)) is not None:
            found[name] = told
    rows: list[Row] = [row("setup: shortened", FACTOR, "times")]
    for name, told in found.items():
        label = f"setup: {scale.tasks} tasks of {scale.replicas} replicas: {name}"
        rows.append(row(f"{label}: set-ups run", told["ran"], "set-ups", goal=scale.tasks, better="less"))
        rows.append(row(f"{label}: environments", told["asked"], "environments"))
        rows.append(row(f"{label}: whole", told["wall_s"], "s"))
        rows += spread(f"{label}: a creation", [told["took_s"]])
    rows += missing("setup", crew.absent, crew.faults)
    ran = {name: [float(told["ran"])] for name, told in found.items()}
    panels = [
        Panel(
            "set-ups run",
            "set-ups",
            {**ran, "peers (no snapshots)": [float(scale.tasks * scale.replicas)]},
            scale.tasks,
        ),
        Panel(f"creation, set-up of {SETUP_S / FACTOR:g} s", "ms", bars({n: [t["took_s"]] for n, t in found.items()})),
    ]
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, crew.versions)
