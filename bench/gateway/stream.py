"""Part 3, stream: from an engine's first event sent to its arrival at the caller."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bench.control_figures import quantile
from bench.control_record import Part
from bench.environments.figures import Panel, bars, flat, missing, spread
from bench.gateway.contenders import BARE, NAMES, OURS
from bench.gateway.crew import Crew
from bench.gateway.wire import Wish
from bench.record import Row, row

GOAL_MS = 5.0


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 5
    seconds: float = 20.0
    warm_s: float = 3.0
    width: int = 16
    wait_ms: int = 100
    events: int = 200
    every_ms: int = 10


QUICK = Scale(rounds=1, seconds=5.0, warm_s=2.5)


def measure(scale: Scale, crew: Crew) -> Part:
    first: defaultdict[str, list[list[float]]] = defaultdict(list)
    whole: defaultdict[str, list[list[float]]] = defaultdict(list)
    wish = Wish(wait_ms=scale.wait_ms, events=scale.events, every_ms=scale.every_ms)
    for _, contender in crew.turns(scale.rounds, NAMES):
        told = crew.put(
            contender,
            wish,
            width=scale.width,
            seconds=scale.seconds,
            warm_s=scale.warm_s,
            spread_s=(scale.wait_ms + scale.events * scale.every_ms) / 1000,
        )
        if told is not None:
            first[contender.name].append(told.first_s)
            whole[contender.name].append(told.took_s)
    label = f"{scale.width} streams of {scale.events} events, one in {scale.every_ms} ms"
    rows: list[Row] = []
    for name, rounds in first.items():
        rows += spread(f"{label}: {name}: first event", rounds, goal_ms=GOAL_MS if name == OURS else None)
    if BARE in whole:
        alone_s = quantile(flat(whole[BARE]), 0.5)
        for name, rounds in whole.items():
            more_ms = (quantile(flat(rounds), 0.5) - alone_s) * 1000
            rows.append(row(f"{label}: {name}: whole stream beyond the bare engine's, p50", more_ms, "ms"))
    rows += missing(label, crew.absent, crew.faults)
    panels = [Panel(f"first event after the engine's: {label}", "ms", bars(first), GOAL_MS, crew.absent | crew.faults)]
    return Part(rows, {"first_s": first, "scale": scale, "panels": panels}, crew.versions)
