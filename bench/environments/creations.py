"""Part 3, creations: how many environments a second are made and have done a command, 16 at a time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.control_record import Part
from bench.environments.contenders import BARE, CONTENDERS, DOCKER, OCI, OURS, PEERS, RAW
from bench.environments.crew import Crew
from bench.environments.figures import Panel, bars, missing, spread
from bench.record import Row, row

WIDTH = 16
GOAL_OCI_PER_S = 100.0
GOAL_DOCKER_TO_RAW = 1.78
"""Of docker a ratio: how many a second an engine makes differs by a factor of three between machines."""


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 3
    each: int = 32
    ours: int = 96


QUICK = Scale(rounds=1, each=2, ours=6)


def measure(scale: Scale, crew: Crew) -> Part:
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for _, name in crew.turns(scale.rounds, [name for name in CONTENDERS if name != BARE]):
        count = scale.ours if name in (*OURS, RAW) else scale.each
        if (told := crew.ask(name, "open", count=count, width=WIDTH)) is not None:
            found[name].append(told)
        crew.ask(name, "close", gently=False)
    rates = {name: median(_rate(told) for told in rounds) for name, rounds in found.items()}
    took = {name: [told["took_s"] for told in rounds] for name, rounds in found.items()}
    rows: list[Row] = []
    for name, rate in rates.items():
        goal = GOAL_OCI_PER_S if name == OCI else None
        rows.append(row(f"creations, {WIDTH} at a time: {name}", rate, "1/s", goal=goal))
        rows += spread(f"creation among {WIDTH}: {name}", took[name])
        if failed := sum(told["failed"] for told in found[name]):
            reason = next(told["reason"] for told in found[name] if told["failed"])
            rows.append(Row(f"creations, {WIDTH} at a time: {name}: failed", f"{failed}: {reason}", ""))
    rows += [*_to_raw(rates), *_against(rates), *missing("creations", crew.absent, crew.faults)]
    panels = [
        Panel(f"creations per second, {WIDTH} at a time", "1/s", {name: [rate] for name, rate in rates.items()}),
        Panel(f"one creation among {WIDTH}", "ms", bars(took), notes=crew.absent | crew.faults),
    ]
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, crew.versions)


def _rate(told: dict[str, Any]) -> float:
    return len(told["took_s"]) / float(told["wall_s"])


def _to_raw(rates: dict[str, float]) -> list[Row]:
    """What the machine's pace does not change."""
    return [
        row(
            f"creations, {WIDTH} at a time: {mine} to {RAW}",
            rates[mine] / rates[RAW],
            "x as many",
            goal=GOAL_DOCKER_TO_RAW if mine == DOCKER else None,
        )
        for mine in OURS
        if mine in rates and RAW in rates
    ]


def _against(rates: dict[str, float]) -> list[Row]:
    peers = {name: rates[name] for name in PEERS if name in rates}
    best = max(peers, key=lambda name: peers[name], default=None)
    if best is None:
        return []
    return [
        row(f"creations, {WIDTH} at a time: {mine}, against {best}", rates[mine] / peers[best], "x as many")
        for mine in OURS
        if mine in rates
    ]
