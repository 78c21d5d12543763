"""Part 1, start: from nothing to the end of the first command; and the end, until nothing is there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bench.control_record import Part
from bench.environments.contenders import BARE, CONTENDERS, DOCKER, OCI, OURS, PEERS, RAW, REX, REX_EXECUTE
from bench.environments.crew import Crew
from bench.environments.figures import Panel, against, bars, missing, ratio, spread
from bench.record import Row, row

GOAL_TO_RAW, GOAL_OCI_MS = 0.4, 16.0
RAW_MS = 167.0
"""What the raw engine took where these goals were set: against it a slower machine is held to the same."""
_QUICK_ENDS = (*OURS, RAW, REX, REX_EXECUTE)
"""The others wait ten or fifteen seconds for a shell that ignores their signal: a few times show that."""


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 10
    each: int = 2
    ours: int = 8
    slow_ends: int = 2
    """So many times the end of those is measured whose end takes seconds."""


QUICK = Scale(rounds=1, each=1, ours=3, slow_ends=1)

Times = defaultdict[str, list[list[float]]]


def measure(scale: Scale, crew: Crew) -> Part:
    first, stop, gone = Times(list), Times(list), Times(list)
    cpu: defaultdict[str, list[float]] = defaultdict(list)
    for number, name in crew.turns(scale.rounds, [name for name in CONTENDERS if name != BARE]):
        ends = name in _QUICK_ENDS or number < scale.slow_ends
        count = scale.ours if name in (*OURS, RAW) else scale.each if name in _QUICK_ENDS or not ends else 1
        if (told := crew.ask(name, "lives", count=count, stop=ends)) is None:
            continue
        first[name].append(told["first_s"])
        cpu[name].append(told["cpu_s"])
        if ends:
            stop[name].append(told["stop_s"])
            gone[name].append(told["gone_s"])
    panels = [
        Panel("cold start to the first command's end", "ms", bars(first), notes=crew.absent | crew.faults),
        Panel("the end, until nothing is there", "ms", bars(gone)),
    ]
    samples = {"first_s": first, "stop_s": stop, "gone_s": gone, "cpu_s": cpu, "scale": scale, "panels": panels}
    return Part([*_rows(first, stop, gone, cpu), *missing("start", crew.absent, crew.faults)], samples, crew.versions)


def _rows(first: Times, stop: Times, gone: Times, cpu: defaultdict[str, list[float]]) -> list[Row]:
    rows: list[Row] = []
    for name in first:
        rows += spread(f"start: {name}", first[name], goal_ms=GOAL_OCI_MS if name == OCI else None)
        rows.append(row(f"start: {name}: client CPU", 1000 * sum(cpu[name]) / len(cpu[name]), "ms"))
        rows += spread(f"end returned: {name}", stop[name])
        rows += spread(f"end, all gone: {name}", gone[name])
    docker = f"start: {DOCKER} to raw engine"
    rows += ratio(docker, first[DOCKER], first[RAW], goal=GOAL_TO_RAW)
    rows += ratio(f"start: {OCI} to raw engine", first[OCI], first[RAW], goal=GOAL_OCI_MS / RAW_MS)
    for mine in OURS:
        rows += against("start", first, mine, PEERS)
        rows += against("end, all gone", gone, mine, PEERS)
    return rows
