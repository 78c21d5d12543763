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

from bench.control_record import Part
from bench.environments.contenders import BARE, CONTENDERS, DEFAULT_PATHS, OURS, PEERS, REX
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

STEP, SESSION = "step", "step in a session"

Rounds = defaultdict[str, list[list[float]]]
Cpu = defaultdict[str, list[float]]
Floods = defaultdict[str, list[dict[str, float]]]


def measure(scale: Scale, crew: Crew) -> Part:
    took, cpu = _alone(scale, crew, list(CONTENDERS))
    few = _flooded(crew, list(CONTENDERS), AT_ONCE, scale)
    host = few.pop(BARE, [])
    many = _flooded(crew, list(OURS), scale.many, scale)
    with _remembering(crew):
        sessions, sessions_cpu = _alone(scale, crew, [*OURS, REX])
        sessions_few = _flooded(crew, list(OURS), AT_ONCE, scale)
        sessions_many = _flooded(crew, list(OURS), scale.many, scale)
    ours_alone = {name: rounds for name, rounds in sessions.items() if name in OURS}
    rows = _one(STEP, took, cpu)
    for mine in OURS:
        rows += against(f"{STEP}, default path", took, mine, DEFAULT_PATHS, goal=GOAL_TIMES)
        rows += against(f"{STEP}, any path", took, mine, PEERS)
    rows += [*_few(STEP, few), *_to_host(few, host), *_many(STEP, many, scale.many)]
    rows += _one(SESSION, ours_alone, sessions_cpu)
    for mine in OURS:
        rows += against(SESSION, sessions, mine, (REX,), goal=GOAL_TIMES)
    rows += [*_few(SESSION, sessions_few), *_many(SESSION, sessions_many, scale.many)]
    rows += missing("step", crew.absent, crew.faults)
    one, rate, ends = bars(took), _rates(few), _ends(many)
    one |= _named(bars(ours_alone))
    rate |= _named(_rates(sessions_few))
    ends |= _named(_ends(sessions_many))
    panels = [
        Panel("one command (`true`)", "ms", one, GOAL_P50_MS, crew.absent | crew.faults),
        Panel(f"commands per second, {AT_ONCE} environments", "1/s", rate, GOAL_PER_S),
        Panel(f"one command, {scale.many} environments at once", "ms", ends, GOAL_P99_MS),
    ]
    samples = {"took_s": took, "cpu_s": cpu, "at_8": few, "at_many": many, "host": host, "scale": scale}
    samples |= {"sessions_took_s": sessions, "sessions_at_8": sessions_few, "sessions_at_many": sessions_many}
    return Part(rows, {**samples, "panels": panels}, crew.versions)


@contextmanager
def _remembering(crew: Crew) -> Iterator[None]:
    """What is started of ours in the block gives all commands to one shell."""
    for name in OURS:
        crew.ask(name, "remember", on=True)
    yield
    for name in OURS:
        crew.ask(name, "remember", on=False)


def _alone(scale: Scale, crew: Crew, names: list[str]) -> tuple[Rounds, Cpu]:
    """Seconds and processor seconds by name. One environment of everybody stands through all rounds, so that a round is
    nothing but commands.
    """
    took: Rounds = defaultdict(list)
    cpu: Cpu = defaultdict(list)
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
        elif crew.ask(name, "open", count=environments, width=min(8, environments)) is None:
            continue
        else:
            told = crew.ask(name, "flood", seconds=scale.flood_s)
            crew.ask(name, "close", gently=False)
        if told is not None:
            found[name].append(told)
    return found


def _one(label: str, took: Mapping[str, list[list[float]]], cpu: Cpu) -> list[Row]:
    rows: list[Row] = []
    for name in took:
        rows += spread(f"{label}: {name}", took[name], goal_ms=GOAL_P50_MS if name in OURS else None)
        rows.append(_cpu(f"{label}: {name}: client CPU", median(cpu[name]), of_ours=name in OURS))
    return rows


def _few(label: str, few: Floods) -> list[Row]:
    rows: list[Row] = []
    for name, told in few.items():
        goal = GOAL_PER_S if name in OURS else None
        rows.append(row(f"{label}, {AT_ONCE} environments: {name}", _rate(told), "steps/s", goal=goal))
        metric = f"{label}, {AT_ONCE} environments: {name}: client CPU"
        rows.append(_cpu(metric, median(each["cpu_s"] for each in told), of_ours=name in OURS))
    peers = {name: _rate(few[name]) for name in PEERS if name in few}
    best = max(peers, key=lambda name: peers[name], default=None)
    for mine in OURS:
        if best is not None and mine in few:
            metric = f"{label}, {AT_ONCE} environments: {mine}, against {best}"
            rows.append(row(metric, _rate(few[mine]) / peers[best], "x as many"))
    return rows


def _to_host(few: Floods, host: list[dict[str, float]]) -> list[Row]:
    """How much of what a host that does nothing else makes of new shells."""
    if not host:
        return []
    rows = [row("step: new shells of the host, all processors", _rate(host), "1/s")]
    for mine in OURS:
        shares = [told["per_s"] / limit["per_s"] for told, limit in zip(few.get(mine, []), host, strict=False)]
        if shares:
            rows.append(row(f"step, {AT_ONCE} environments: {mine} to new shells of the host", median(shares), "x"))
    return rows


def _many(label: str, many: Floods, environments: int) -> list[Row]:
    rows: list[Row] = []
    for name, told in many.items():
        metric = f"{label}, {environments} environments: {name}"
        rows.append(row(metric, _rate(told), "steps/s"))
        rows.append(row(f"{metric}: p50", 1000 * median(each["p50_s"] for each in told), "ms"))
        p99_ms = 1000 * median(each["p99_s"] for each in told)
        rows.append(row(f"{metric}: p99", p99_ms, "ms", goal=GOAL_P99_MS, better="less"))
    return rows


def _rate(told: list[dict[str, float]]) -> float:
    return median(each["per_s"] for each in told)


def _named(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {f"{name}, session": figures for name, figures in found.items()}


def _cpu(label: str, seconds: float, *, of_ours: bool) -> Row:
    return row(label, 1000 * seconds, "ms", goal=GOAL_CPU_MS if of_ours else None, better="less")


def _rates(floods: Floods) -> dict[str, list[float]]:
    return {name: [_rate(told)] for name, told in floods.items()}


def _ends(floods: Floods) -> dict[str, list[float]]:
    return {
        name: [1000 * median(each[key] for each in told) for key in ("p50_s", "p99_s")] for name, told in floods.items()
    }
