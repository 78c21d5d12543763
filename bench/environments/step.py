"""Part 2, step: one command in a standing environment, alone and in many environments at once.

Ours twice: each command in a shell of its own, and all of them in one that remembers (`Environment.shell`), as sessions
of peers do. What a host can start of new shells at all stands beside the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.control_record import Part
from bench.environments.contenders import BARE, CONTENDERS, DEFAULT_PATHS, OURS, PEERS, REX
from bench.environments.crew import Crew
from bench.environments.figures import Panel, against, bars, missing, round_ratio, spread
from bench.record import Row, row

GOAL_TIMES, GOAL_P99_MS, GOAL_CPU_MS = 30.0, 100.0, 0.15
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

STEP, SESSION = "step", "step in a session"
GOAL_P50_MS = {STEP: 1.1, SESSION: 0.2}
GOAL_PER_S = {STEP: 2_000.0, SESSION: 12_000.0}

Floods = defaultdict[str, list[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Found:
    """Of commands of one sort, by name: one after the other, and in few and many environments at once."""

    label: str
    took: defaultdict[str, list[list[float]]]
    cpu: defaultdict[str, list[float]]
    few: Floods
    many: Floods


def measure(scale: Scale, crew: Crew) -> Part:
    single = _found(STEP, scale, crew, alone=list(CONTENDERS), few=list(CONTENDERS))
    with _remembering(crew):
        session = _found(SESSION, scale, crew, alone=[*OURS, REX], few=list(OURS))
    host = single.few.pop(BARE, [])
    rows = _alone_rows(single)
    for mine in OURS:
        rows += against(f"{STEP}, default path", single.took, mine, DEFAULT_PATHS, goal=GOAL_TIMES)
        rows += against(f"{STEP}, any path", single.took, mine, PEERS)
    rows += [*_few_rows(single), *_host_rows(single, host), *_many_rows(single, scale.many), *_alone_rows(session)]
    for mine in OURS:
        rows += against(SESSION, session.took, mine, (REX,), goal=GOAL_TIMES)
    rows += [*_few_rows(session), *_many_rows(session, scale.many), *missing("step", crew.absent, crew.faults)]
    panels = [
        Panel(
            "one command (`true`)",
            "ms",
            bars(single.took) | _named(bars(session.took)),
            GOAL_P50_MS[STEP],
            crew.absent | crew.faults,
        ),
        Panel(
            f"commands per second, {AT_ONCE} environments",
            "1/s",
            _rates(single.few) | _named(_rates(session.few)),
            GOAL_PER_S[STEP],
        ),
        Panel(
            f"one command, {scale.many} environments at once",
            "ms",
            _ends(single.many) | _named(_ends(session.many)),
            GOAL_P99_MS,
        ),
    ]
    samples: dict[str, Any] = {"scale": scale, "panels": panels, "host": host}
    samples |= {"took_s": single.took, "cpu_s": single.cpu, "at_8": single.few, "at_many": single.many}
    samples |= {"sessions_took_s": session.took, "sessions_at_8": session.few, "sessions_at_many": session.many}
    return Part(rows, samples, crew.versions)


def _found(label: str, scale: Scale, crew: Crew, *, alone: list[str], few: list[str]) -> Found:
    return Found(
        label,
        *_alone(scale, crew, alone),
        _flooded(crew, few, AT_ONCE, scale),
        _flooded(crew, list(OURS), scale.many, scale),
    )


@contextmanager
def _remembering(crew: Crew) -> Iterator[None]:
    """What is started of ours in the block gives all commands to one shell."""
    for name in OURS:
        crew.ask(name, "remember", on=True)
    yield
    for name in OURS:
        crew.ask(name, "remember", on=False)


def _alone(
    scale: Scale, crew: Crew, names: list[str]
) -> tuple[defaultdict[str, list[list[float]]], defaultdict[str, list[float]]]:
    """Seconds and processor seconds by name. One environment of everybody stands through all rounds, so that a round is
    nothing but commands.
    """
    took: defaultdict[str, list[list[float]]] = defaultdict(list)
    cpu: defaultdict[str, list[float]] = defaultdict(list)
    names = [name for name in names if crew.ask(name, "open", count=1, width=1) is not None]
    for _, name in crew.turns(scale.rounds, names):
        count = scale.ours if name in (*OURS, BARE) else scale.each
        if (told := crew.ask(name, "steps", count=count)) is not None:
            took[name].append(told["took_s"])
            cpu[name].append(told["cpu_s"])
    for name in names:
        crew.ask(name, "close", gently=False)
    return took, cpu


def _flooded(crew: Crew, names: list[str], environments: int, scale: Scale) -> Floods:
    """Commands by name, in all environments at once; of the bare host, new shells by all its processors at once."""
    found: Floods = defaultdict(list)
    for _, name in crew.turns(scale.flood_rounds, names):
        if name == BARE:
            told = crew.ask(name, "new_shells", seconds=scale.flood_s)
        else:
            told = _flood(crew, name, environments, scale.flood_s)
        if told is not None:
            found[name].append(told)
    return found


def _flood(crew: Crew, name: str, environments: int, seconds: float) -> dict[str, float] | None:
    if crew.ask(name, "open", count=environments, width=min(8, environments)) is None:
        return None
    told: dict[str, float] | None = crew.ask(name, "flood", seconds=seconds)
    crew.ask(name, "close", gently=False)
    return told


def _alone_rows(found: Found) -> list[Row]:
    rows: list[Row] = []
    for name, took in found.took.items():
        rows += spread(f"{found.label}: {name}", took, goal_ms=GOAL_P50_MS[found.label] if name in OURS else None)
        rows.append(_cpu(f"{found.label}: {name}: client CPU", median(found.cpu[name]), of_ours=name in OURS))
    return rows


def _few_rows(found: Found) -> list[Row]:
    rows: list[Row] = []
    few, label = found.few, f"{found.label}, {AT_ONCE} environments"
    for name, told in few.items():
        goal = GOAL_PER_S[found.label] if name in OURS else None
        rows.append(row(f"{label}: {name}", _rate(told), "steps/s", goal=goal))
        cpu_s = median(each["cpu_s"] for each in told)
        rows.append(_cpu(f"{label}: {name}: client CPU", cpu_s, of_ours=name in OURS))
    peers = {name: _rate(few[name]) for name in PEERS if name in few}
    best = max(peers, key=lambda name: peers[name], default=None)
    for mine in OURS:
        if best is not None and mine in few:
            rows.append(row(f"{label}: {mine}, against {best}", _rate(few[mine]) / peers[best], "x as many"))
    return rows


def _host_rows(found: Found, host: list[dict[str, float]]) -> list[Row]:
    """How much of what a host that does nothing else makes of new shells."""
    rows = [row(f"{STEP}: new shells of the host, all processors", _rate(host), "1/s")] if host else []
    for mine in OURS:
        share = round_ratio(*([[told["per_s"]] for told in those] for those in (found.few.get(mine, []), host)))
        if share is not None:
            rows.append(row(f"{STEP}, {AT_ONCE} environments: {mine} to new shells of the host", share, "x"))
    return rows


def _many_rows(found: Found, environments: int) -> list[Row]:
    rows: list[Row] = []
    for name, told in found.many.items():
        metric = f"{found.label}, {environments} environments: {name}"
        rows.append(row(metric, _rate(told), "steps/s"))
        rows.append(row(f"{metric}: p50", 1000 * median(each["p50_s"] for each in told), "ms"))
        p99_ms = 1000 * median(each["p99_s"] for each in told)
        rows.append(row(f"{metric}: p99", p99_ms, "ms", goal=GOAL_P99_MS, better="less"))
    return rows


def _rate(told: list[dict[str, float]]) -> float:
    return median(each["per_s"] for each in told)


def _named(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Ours alone: a session is SWE-ReX's only way."""
    return {f"{name}, session": figures for name, figures in found.items() if name in OURS}


def _cpu(label: str, seconds: float, *, of_ours: bool) -> Row:
    return row(label, 1000 * seconds, "ms", goal=GOAL_CPU_MS if of_ours else None, better="less")


def _rates(floods: Floods) -> dict[str, list[float]]:
    return {name: [_rate(told)] for name, told in floods.items()}


def _ends(floods: Floods) -> dict[str, list[float]]:
    return {
        name: [1000 * median(each[key] for each in told) for key in ("p50_s", "p99_s")] for name, told in floods.items()
    }
