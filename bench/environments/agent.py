"""Part 5, agent: a scripted task of 100 steps, whole. Overhead: what it takes beyond a local shell."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from bench.control_figures import quantile
from bench.control_record import Part
from bench.environments.contenders import BARE, CONTENDERS, OURS, PEERS, RAW
from bench.environments.crew import Crew
from bench.environments.figures import Panel, missing, spread
from bench.record import Row, row

GOAL_TIMES = 5.0
_FLOOR = 0.02
"""An overhead below this share of the commands' own time is taken for it: less cannot be told from noise."""

Told = dict[str, float]


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 5
    steps: int = 100


QUICK = Scale(rounds=1, steps=10)


def script(steps: int) -> list[str]:
    """What an agent does, over and over: write, read, edit, search, run, look at the change, keep it."""
    there = "cd /tmp/agent"
    commands = [
        "mkdir -p /tmp/agent && cd /tmp/agent && git init -q . && git config user.name a && git config user.email a@b"
    ]
    for number in range(steps):
        module = f"m{number}"
        commands += [
            rf"{there} && printf 'def f(x):\n    return x + {number}\n' > {module}.py",
            f"{there} && cat {module}.py",
            f"{there} && sed -i 's/return x/return 2 * x/' {module}.py",
            f"{there} && grep -n 'return' {module}.py",
            f"{there} && python3 -c 'import {module}; print({module}.f(1))'",
            f"{there} && git add -A",
            f"{there} && git --no-pager diff --cached --stat",  # a session on a terminal would wait for its pager
            f"{there} && git commit -q -m 'step {number}'",
            f"{there} && ls -la",
            f"{there} && head -c 100 {module}.py | wc -c",
        ]
    return commands[:steps]


def measure(scale: Scale, crew: Crew) -> Part:
    found: defaultdict[str, list[Told]] = defaultdict(list)
    commands = script(scale.steps)
    for _, name in crew.turns(scale.rounds, list(CONTENDERS)):
        told = crew.ask(name, "task", commands=commands)
        if told is None:
            continue
        if told["failed"]:
            crew.faults[name] = f"{told['failed']} of its {scale.steps} commands failed"
            continue
        found[name].append(told)
    overheads = {name: overhead_s(rounds, found[BARE]) for name, rounds in found.items() if name != BARE}
    floor_s = _FLOOR * median(told["steps_s"] for told in found[BARE]) if found[BARE] else float("nan")
    rows = [*_rows(found, overheads, floor_s, scale.steps), *missing("agent", crew.absent, crew.faults)]
    whole = {name: [1000 * median(told["whole_s"] for told in rounds)] for name, rounds in found.items()}
    panels = [
        Panel(f"{scale.steps} steps, whole", "ms", whole, notes=crew.absent | crew.faults),
        Panel("of it overhead", "ms", {name: [1000 * max(s, floor_s)] for name, s in overheads.items()}),
    ]
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, crew.versions)


def overhead_s(rounds: list[Told], bare: list[Told]) -> float:
    """The median over rounds of what a task took beyond its commands in the same round's local shell."""
    pairs = zip(rounds, bare, strict=False)
    return median(told["whole_s"] - floor["steps_s"] for told, floor in pairs) if bare else float("nan")


def _rows(found: dict[str, list[Told]], overheads: dict[str, float], floor_s: float, steps: int) -> list[Row]:
    rows: list[Row] = []
    for name, rounds in found.items():
        rows += spread(f"agent, {steps} steps: {name}", [[told["whole_s"]] for told in rounds])
        for key in ("start", "steps", "stop", "cpu"):
            rows.append(row(f"agent: {name}: {key}", 1000 * quantile([told[f"{key}_s"] for told in rounds], 0.5), "ms"))
    rows += [row(f"agent: {name}: overhead", 1000 * seconds, "ms") for name, seconds in overheads.items()]
    for mine in (name for name in OURS if name in overheads):
        own_s = max(overheads[mine], floor_s)
        for peer in (*PEERS, RAW):
            if peer in overheads:
                goal = GOAL_TIMES if peer in PEERS else None
                rows.append(
                    row(f"agent: {mine}, against {peer}", overheads[peer] / own_s, "x less overhead", goal=goal)
                )
    return rows
