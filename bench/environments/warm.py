"""Part 7, warm: hand-outs by the pool (used before); resets and teardowns beside the engine's own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bench.control_record import Part
from bench.environments.contenders import DOCKER, OURS, RAW
from bench.environments.crew import Crew
from bench.environments.figures import Panel, bars, missing, ratio, spread
from bench.record import Row

GOAL_HANDOUT_MS, GOAL_RECYCLE_MS, GOAL_TEARDOWN = 5.0, 60.0, 1.5
RAW_REPLACED_MS = 168.0
"""What the raw engine took to replace a container where these goals were set: a slower machine is held to the same."""


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 5
    each: int = 20


QUICK = Scale(rounds=1, each=3)


def measure(scale: Scale, crew: Crew) -> Part:
    found: defaultdict[str, defaultdict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for _, name in crew.turns(scale.rounds, [*OURS, RAW]):
        if name == RAW:
            for what, asked in (("teardown", "removals"), ("recycle", "replacements")):
                if (told := crew.ask(name, asked, count=scale.each)) is not None:
                    found[what][name].append(told["took_s"])
        elif (told := crew.ask(name, "pooled", count=scale.each)) is not None:
            for what in ("handout", "recycle", "teardown"):
                found[what][name].append(told[f"{what}_s"])
    goals = {"handout": GOAL_HANDOUT_MS, "recycle": GOAL_RECYCLE_MS}
    rows: list[Row] = []
    for what, took in found.items():
        for name in took:
            rows += spread(f"warm: {what}: {name}", took[name], goal_ms=goals.get(what) if name in OURS else None)
    removed, replaced = f"{DOCKER} to raw kill + remove", f"{DOCKER} to raw kill + remove + create + start"
    teardown, recycle = found["teardown"], found["recycle"]
    rows += ratio(f"warm: teardown: {removed}", teardown[DOCKER], teardown[RAW], goal=GOAL_TEARDOWN)
    goal = GOAL_RECYCLE_MS / RAW_REPLACED_MS
    rows += ratio(f"warm: recycle: {replaced}", recycle[DOCKER], recycle[RAW], goal=goal)
    rows += missing("warm", crew.absent, crew.faults)
    panels = [Panel(what, "ms", bars(took), goals.get(what), crew.faults) for what, took in found.items()]
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, crew.versions)
