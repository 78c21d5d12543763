"""Part 7, warm: hand-outs by the pool (used before); resets and teardowns beside the engine's own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bench.control_record import Part
from bench.environments.contenders import DOCKER, OCI, OURS, RAW
from bench.environments.crew import Crew
from bench.environments.figures import Panel, bars, missing, ratio, spread
from bench.record import Row

GOAL_HANDOUT_MS, GOAL_TEARDOWN = 5.0, 1.5
GOAL_RECYCLE_MS = {DOCKER: 100.0, OCI: 25.0}


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
    goals = {"handout": dict.fromkeys(OURS, GOAL_HANDOUT_MS), "recycle": GOAL_RECYCLE_MS}
    rows: list[Row] = []
    for what, took in found.items():
        for name in took:
            rows += spread(f"warm: {what}: {name}", took[name], goal_ms=goals.get(what, {}).get(name))
    removed, replaced = f"{DOCKER} to raw kill + remove", f"{DOCKER} to raw kill + remove + create + start"
    teardown, recycle = found["teardown"], found["recycle"]
    rows += ratio(f"warm: teardown: {removed}", teardown[DOCKER], teardown[RAW], goal=GOAL_TEARDOWN)
    rows += ratio(f"warm: recycle: {replaced}", recycle[DOCKER], recycle[RAW])
    rows += missing("warm", crew.absent, crew.faults)
    panels = [Panel(what, "ms", bars(took), notes=crew.faults) for what, took in found.items()]
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, crew.versions)
