"""Part 1, overhead: what a call takes beyond the engine, at 64 callers.

With an engine of 2 s (1 to 3) they come to some 32 calls a second, far from anybody's limit; with one of 100 ms to
some 600.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from bench.control_figures import quantile
from bench.control_record import Part
from bench.environments.figures import Panel, missing
from bench.gateway.contenders import BARE, NAMES, OURS
from bench.gateway.crew import Crew
from bench.gateway.wire import Wish
from bench.record import Row, row

GOAL_P50_MS, GOAL_P99_MS = 3.0, 15.0


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 5
    seconds: float = 20.0
    warm_s: float = 4.0
    width: int = 64
    wait_ms: tuple[int, ...] = (2000, 100)


QUICK = Scale(rounds=1, seconds=4.0, warm_s=2.0, wait_ms=(1000, 100))


def measure(scale: Scale, crew: Crew) -> Part:
    found: dict[int, dict[str, list[list[float]]]] = {}
    rows: list[Row] = []
    panels: list[Panel] = []
    for wait_ms in scale.wait_ms:
        crew.begin()
        beyond: defaultdict[str, list[list[float]]] = defaultdict(list)
        rates: defaultdict[str, list[float]] = defaultdict(list)
        for _, contender in crew.turns(scale.rounds, NAMES):
            told = crew.put(
                contender,
                Wish(wait_ms=wait_ms),
                width=scale.width,
                seconds=scale.seconds,
                warm_s=scale.warm_s,
                spread_s=wait_ms / 1000,
            )
            if told is not None:
                beyond[contender.name].append(told.beyond_s)
                rates[contender.name].append(told.per_s)
        label = f"{scale.width} callers, an engine that takes {wait_ms} ms"
        rows += _rows(label, beyond, rates) + missing(label, crew.absent, crew.faults)
        bars = {name: [_ms(rounds, 0.5), _ms(rounds, 0.99)] for name, rounds in beyond.items()}
        panels.append(Panel(f"beyond the engine: {label}", "ms", bars, GOAL_P50_MS, crew.absent | crew.faults))
        found[wait_ms] = {name: [_thin(values) for values in rounds] for name, rounds in beyond.items()}
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, crew.versions)


def _rows(label: str, beyond: dict[str, list[list[float]]], rates: dict[str, list[float]]) -> list[Row]:
    rows: list[Row] = []
    for name, rounds in beyond.items():
        goals = (GOAL_P50_MS, GOAL_P99_MS) if name == OURS else (None, None)
        what = "load and loopback alone" if name == BARE else f"{name}, overhead"
        rows += [
            row(f"{label}: {what}: p50", _ms(rounds, 0.5), "ms", goal=goals[0], better="less"),
            row(f"{label}: {what}: p99", _ms(rounds, 0.99), "ms", goal=goals[1], better="less"),
            row(f"{label}: {name}: offered", median(rates[name]), "calls/s"),
            row(f"{label}: {name}: n", sum(map(len, rounds)), "samples"),
        ]
    return rows


def _ms(rounds: list[list[float]], share: float) -> float:
    """The median over rounds of a quantile: what disturbs one round does not count."""
    return median(quantile(values, share) for values in rounds) * 1000


def _thin(values: list[float]) -> list[float]:
    """The quantiles in steps of one percent: enough for a picture, and a hundredth of the file."""
    return [quantile(values, share / 100) for share in range(1, 101)]
