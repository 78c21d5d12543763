"""Part 9, tax: the hours of workers that a million rollouts of 150 actions cost beyond their commands.

Of the scripted agent of part 5, ours alone: what a rollout takes beyond the same commands in local shells of the same
kind, a new one for each command or one for all (see README, "Step and step in a session").
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
_KINDS = {"a shell for each action": False, "one shell for all": True}
_MILLION, _HOUR_S = 1_000_000, 3600.0


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 8
    steps: int = 150


QUICK = Scale(rounds=1, steps=10)


def measure(scale: Scale, crew: Crew) -> Part:
    found: defaultdict[str, defaultdict[str, list[Told]]] = defaultdict(lambda: defaultdict(list))
    commands = script(scale.steps)
    for number, name in crew.turns(scale.rounds, [BARE, *GOAL_HOURS]):
        for kind, remembers in sorted(_KINDS.items(), reverse=number % 2 == 1):  # the first start of a turn is slower
            crew.ask(name, "remember", on=remembers)
            told = crew.ask(name, "task", commands=commands)
            if told is None:
                continue
            if told["failed"]:
                crew.faults[name] = f"{told['failed']} of its {scale.steps} commands failed"
                continue
            found[kind][name].append(told)
    for name in GOAL_HOURS:
        crew.ask(name, "remember", on=False)
    crew.ask(BARE, "remember", on=True)
    rows: list[Row] = []
    panels = [_panel(kind, rounds, scale, rows) for kind, rounds in found.items()]
    rows += _new_shells(found, scale)
    samples = {"found": found, "scale": scale, "panels": panels}
    return Part([*rows, *missing("tax", crew.absent, crew.faults)], samples, crew.versions)


def _panel(kind: str, found: dict[str, list[Told]], scale: Scale, rows: list[Row]) -> Panel:
    """Adds the figures of this kind of shell to the rows, and draws them."""
    seconds = {name: overhead_s(found[name], found[BARE]) for name in GOAL_HOURS if found[name]}
    hours = {name: each * _MILLION / _HOUR_S for name, each in seconds.items()}
    for name, each in hours.items():
        rows.append(row(f"tax, {name}: a rollout of {scale.steps} actions, {kind}", 1000 * seconds[name], "ms"))
        metric = f"tax, {name}: a million rollouts of {scale.steps} actions, {kind}"
        rows.append(row(metric, each, "worker-hours", goal=GOAL_HOURS[name], better="less"))
    return Panel(f"worker-hours per million rollouts, {kind}", "h", {name: [each] for name, each in hours.items()})


def _new_shells(found: dict[str, dict[str, list[Told]]], scale: Scale) -> list[Row]:
    """What the new shells alone cost, on this host without any environment: no part of the tax."""
    each, one = (found[kind][BARE] for kind in _KINDS)
    metric = f"tax: local shells, {scale.steps} new ones beyond one"
    return [row(metric, 1000 * overhead_s(each, one), "ms")]
