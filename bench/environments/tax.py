"""Part 9, tax: the hours of workers that a million rollouts of 150 actions cost beyond their commands.

Of the scripted agent of part 5, ours alone: what a rollout takes beyond the same commands in a local shell.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bench.control_record import Part
from bench.environments.agent import Told, overhead_s, script
from bench.environments.contenders import BARE, DOCKER, OCI
from bench.environments.crew import Crew
from bench.environments.figures import Panel, missing
from bench.record import Row, row

GOAL_HOURS = {DOCKER: 70.0, OCI: 50.0}
_MILLION, _HOUR_S = 1_000_000, 3600.0


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 8
    steps: int = 150


QUICK = Scale(rounds=1, steps=10)


def measure(scale: Scale, crew: Crew) -> Part:
    found: defaultdict[str, list[Told]] = defaultdict(list)
    commands = script(scale.steps)
    for _, name in crew.turns(scale.rounds, [BARE, *GOAL_HOURS]):
        told = crew.ask(name, "task", commands=commands)
        if told is None:
            continue
        if told["failed"]:
            crew.faults[name] = f"{told['failed']} of its {scale.steps} commands failed"
            continue
        found[name].append(told)
    seconds = {name: overhead_s(found[name], found[BARE]) for name in GOAL_HOURS if found[name]}
    hours = {name: each * _MILLION / _HOUR_S for name, each in seconds.items()}
    rows: list[Row] = []
    for name, each in hours.items():
        rows.append(row(f"tax, {name}: a rollout of {scale.steps} actions beyond them", 1000 * seconds[name], "ms"))
        metric = f"tax, {name}: a million rollouts of {scale.steps} actions"
        rows.append(row(metric, each, "worker-hours", goal=GOAL_HOURS[name], better="less"))
    panels = [Panel("hours of a worker per million rollouts", "h", {name: [each] for name, each in hours.items()})]
    samples = {"found": found, "scale": scale, "panels": panels}
    return Part([*rows, *missing("tax", crew.absent, crew.faults)], samples, crew.versions)
