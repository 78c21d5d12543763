"""Part 2, step: one command in a standing environment, alone and in many environments at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.control_record import Part
from bench.environments.contenders import BARE, CONTENDERS, DEFAULT_PATHS, OURS, PEERS
from bench.environments.crew import Crew
from bench.environments.figures import Panel, against, bars, missing, spread
from bench.record import Row, row

GOAL_P50_MS, GOAL_TIMES, GOAL_PER_S, GOAL_P99_MS, GOAL_CPU_MS = 1.5, 30.0, 2_000.0, 100.0, 0.15
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 5
    each: int = 40
    ours: int = 400
    flood_s: float = 3.0
    flood_rounds: int = 3
    many: int = 128
    """Environments at once, of ours alone."""


QUICK = Scale(rounds=1, each=3, ours=20, flood_s=0.3, flood_rounds=1, many=8)

Floods = defaultdict[str, list[dict[str, float]]]


def measure(scale: Scale, crew: Crew) -> Part:
    took: defaultdict[str, list[list[float]]] = defaultdict(list)
    cpu: defaultdict[str, list[float]] = defaultdict(list)
    for name, told in _alone(scale, crew):
        took[name].append(told["took_s"])
        cpu[name].append(told["cpu_s"])
    few = _flooded(crew, [name for name in CONTENDERS if name != BARE], AT_ONCE, scale.flood_rounds, scale.flood_s)
    many = _flooded(crew, list(OURS), scale.many, scale.flood_rounds, scale.flood_s)
    rows: list[Row] = []
    for name in took:
        rows += spread(f"step: {name}", took[name], goal_ms=GOAL_P50_MS if name in OURS else None)
        rows.append(_cpu(f"step: {name}: client CPU", median(cpu[name]), of_ours=name in OURS))
    for mine in OURS:
        rows += against("step, default path", took, mine, DEFAULT_PATHS, goal=GOAL_TIMES)
        rows += against("step, any path", took, mine, PEERS)
    rows += [*_few(few), *_many(many, scale.many), *missing("step", crew.absent, crew.faults)]
    panels = [
        Panel("one command (`true`)", "ms", bars(took), GOAL_P50_MS, crew.absent | crew.faults),
        Panel(f"commands per second, {AT_ONCE} environments", "1/s", _rates(few), GOAL_PER_S),
        Panel(f"one command, {scale.many} environments at once", "ms", _ends(many), GOAL_P99_MS),
    ]
    samples = {"took_s": took, "cpu_s": cpu, "at_8": few, "at_many": many, "scale": scale, "panels": panels}
    return Part(rows, samples, crew.versions)


def _alone(scale: Scale, crew: Crew) -> list[tuple[str, dict[str, Any]]]:
    """One environment of everybody stands through all rounds, so that a round is nothing but commands."""
    names = [name for name in CONTENDERS if crew.ask(name, "open", count=1, width=1) is not None]
    found = []
    for _, name in crew.turns(scale.rounds, names):
        count = scale.ours if name in (*OURS, BARE) else scale.each
        if (told := crew.ask(name, "steps", count=count)) is not None:
            found.append((name, told))
    for name in names:
        crew.ask(name, "close", gently=False)
    return found


def _flooded(crew: Crew, names: list[str], environments: int, rounds: int, seconds: float) -> Floods:
    found: Floods = defaultdict(list)
    for _, name in crew.turns(rounds, names):
        if crew.ask(name, "open", count=environments, width=min(8, environments)) is None:
            continue
        if (told := crew.ask(name, "flood", seconds=seconds)) is not None:
            found[name].append(told)
        crew.ask(name, "close", gently=False)
    return found


def _few(few: Floods) -> list[Row]:
    rows: list[Row] = []
    for name, told in few.items():
        goal = GOAL_PER_S if name in OURS else None
        rate = median(each["per_s"] for each in told)
        rows.append(row(f"step, {AT_ONCE} environments: {name}", rate, "steps/s", goal=goal))
        label = f"step, {AT_ONCE} environments: {name}: client CPU"
        rows.append(_cpu(label, median(each["cpu_s"] for each in told), of_ours=name in OURS))
    peers = {name: median(each["per_s"] for each in few[name]) for name in PEERS if name in few}
    best = max(peers, key=lambda name: peers[name], default=None)
    for mine in OURS:
        if best is not None and mine in few:
            rate = median(each["per_s"] for each in few[mine])
            rows.append(row(f"step, {AT_ONCE} environments: {mine}, against {best}", rate / peers[best], "x as many"))
    return rows


def _many(many: Floods, environments: int) -> list[Row]:
    rows: list[Row] = []
    for name, told in many.items():
        label = f"step, {environments} environments: {name}"
        rows.append(row(label, median(each["per_s"] for each in told), "steps/s"))
        rows.append(row(f"{label}: p50", 1000 * median(each["p50_s"] for each in told), "ms"))
        p99_ms = 1000 * median(each["p99_s"] for each in told)
        rows.append(row(f"{label}: p99", p99_ms, "ms", goal=GOAL_P99_MS, better="less"))
    return rows


def _cpu(label: str, seconds: float, *, of_ours: bool) -> Row:
    return row(label, 1000 * seconds, "ms", goal=GOAL_CPU_MS if of_ours else None, better="less")


def _rates(floods: Floods) -> dict[str, list[float]]:
    return {name: [median(each["per_s"] for each in told)] for name, told in floods.items()}


def _ends(floods: Floods) -> dict[str, list[float]]:
    return {
        name: [1000 * median(each[key] for each in told) for key in ("p50_s", "p99_s")] for name, told in floods.items()
    }
