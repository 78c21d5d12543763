"""Part 2, saturation: calls per second before an engine that answers at once, whole and in streams."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from bench.control_figures import median_ratio
from bench.control_record import Part
from bench.environments.figures import Panel, missing
from bench.gateway import processes
from bench.gateway.contenders import BARE, LITELLM, NAMES, OURS
from bench.gateway.crew import Crew
from bench.gateway.wire import Wish
from bench.record import Row, row

GOAL_TIMES = 5.0
WHOLE, STREAMED = "calls", "events"


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 5
    seconds: float = 10.0
    warm_s: float = 3.0
    width: int = 64
    streams: int = 16
    events: int = 200


QUICK = Scale(rounds=1, seconds=5.0, warm_s=1.0, streams=4, events=50)


@dataclass(frozen=True, slots=True)
class Round:
    """One contender's round. `cpu_share`: of one core, by the process that serves; `load_share`: by the load's."""

    per_s: float
    cpu_share: float
    load_share: float


def measure(scale: Scale, crew: Crew) -> Part:
    rows: list[Row] = []
    panels: list[Panel] = []
    found: dict[str, dict[str, list[Round]]] = {}
    for what, wish, width in (
        (WHOLE, Wish(), scale.width),
        (STREAMED, Wish(events=scale.events), scale.streams),
    ):
        crew.begin()
        rounds = _rounds(scale, crew, what, wish, width)
        label = f"saturation, {width} callers: {what}"
        rows += _rows(label, what, rounds) + missing(label, crew.absent, crew.faults)
        bars = {name: [median(one.per_s for one in taken)] for name, taken in rounds.items()}
        panels.append(Panel(label, "1/s", bars, notes=crew.absent | crew.faults))
        found[what] = rounds
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, crew.versions)


def _rounds(scale: Scale, crew: Crew, what: str, wish: Wish, width: int) -> dict[str, list[Round]]:
    rounds: defaultdict[str, list[Round]] = defaultdict(list)
    window_s = scale.seconds + scale.warm_s
    for _, contender in crew.turns(scale.rounds, NAMES):
        used_s = processes.cpu_s(contender.pid)
        told = crew.put(contender, wish, width=width, seconds=scale.seconds, warm_s=scale.warm_s)
        if told is None:
            continue
        used_s = processes.cpu_s(contender.pid) - used_s
        per_s = told.per_s if what == WHOLE else told.per_s * scale.events
        rounds[contender.name].append(Round(per_s, used_s / window_s, told.cpu_s / window_s))
    return rounds


def _rows(label: str, what: str, rounds: dict[str, list[Round]]) -> list[Row]:
    rows: list[Row] = []
    for name, taken in rounds.items():
        rows += [
            row(f"{label}: {name}", median(one.per_s for one in taken), "1/s"),
            row(f"{label}: {name}: of a core", median(one.cpu_share for one in taken), "share"),
            row(f"{label}: {name}: the load, of its core", median(one.load_share for one in taken), "share"),
        ]
    for above, below, goal in ((OURS, LITELLM, GOAL_TIMES if what == WHOLE else None), (BARE, OURS, None)):
        if len(rounds.get(above, ())) == len(rounds.get(below, ())) > 0:
            ratio = median_ratio([one.per_s for one in rounds[above]], [one.per_s for one in rounds[below]])
            rows.append(row(f"{label}: {above}, against {below}", ratio, "x", goal=goal))
    return rows
