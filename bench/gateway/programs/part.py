"""Part 7, programs: 256 of them before two engines that are full, in our order and first come first served.

Both orders are the gateway as it runs, with the same engines, programs and arrivals, in turns. Job time is from a
program's arrival to its last answer. Users' tokens (prompt and answer, as engines count them) are compared over the
moments at which each user has a call waiting; with and without what was kept of a prefix. For the goal each user has a
quarter of the programs: only users who ask for equally much can be given equally much. The adverse workloads: users of
40, 30, 20 and 10 % of the programs, of whom the last often has one program that waits, and 64 programs that all begin
at once. Beside them: the first 64 of a stream alone, before the engines have been full for long.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from app.ledger import model_replicas
from app.ledger.model_replicas import NewReplica
from app.models.engines import EngineKind
from app.models.model_calls import Dialect
from bench.control_figures import jain, quantile
from bench.control_record import Part
from bench.environments.figures import Panel
from bench.gateway import contenders, ours, processes, wire
from bench.gateway.crew import Say
from bench.gateway.programs import workload
from bench.gateway.programs.running import Done, DoneCall, Running
from bench.gateway.programs.workload import Program
from bench.record import Row, row

GOAL_TIMES, GOAL_JAIN, GOAL_STICKY, GOAL_REFUSED = 1.5, 0.95, 0.95, 0.05
OURS, FIRST_COME = "MegaFlow", "first come first served"
_MODULES = {OURS: "app.model_service.gateway", FIRST_COME: "bench.gateway.programs.first_come"}
_PATIENCE_S = 20.0
_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Scale:
    seeds: tuple[int, ...] = workload.SEEDS
    programs: int = workload.PROGRAMS
    few: int = workload.FEW


QUICK = Scale(seeds=(1,), programs=48, few=16)


def measure(scale: Scale, say: Say) -> Part:
    """Raises: MegaFlowError, RuntimeError, ExceptionGroup: something did not start, or did not answer."""
    rows: list[Row] = []
    panels: list[Panel] = []
    found: dict[str, dict[str, list[Done]]] = {}
    for label, count, at_once, equal in (
        (f"{scale.programs} programs in a stream", scale.programs, False, True),
        (f"{scale.programs} programs, users of 40 to 10 %", scale.programs, False, False),
        (f"{scale.few} programs at once", scale.few, True, True),
        (f"the first {scale.few} programs of a stream", scale.few, False, True),
    ):
        done: dict[str, list[Done]] = {name: [] for name in _MODULES}
        read = [_programs(seed, count, equal=equal) for seed in scale.seeds]
        for number, programs in enumerate(read):
            for name in list(_MODULES)[:: 1 if number % 2 else -1]:
                say(f"{label}, seed {scale.seeds[number]}: {name}")
                done[name].append(_round(name, programs, at_once=at_once))
        main = count == scale.programs and equal
        rows += _job_rows(label, scale.seeds, done, goal=GOAL_TIMES if main else None)
        if count == scale.programs:
            rows += [one for name in _MODULES for one in _promise_rows(label, read, name, done[name], goals=main)]
        bars = {name: [mean(mean(one.job_s) for one in rounds)] for name, rounds in done.items()}
        panels.append(Panel(f"mean job time: {label}", "s", bars))
        found[label] = done
    thin = {
        label: {name: [one.job_s for one in rounds] for name, rounds in done.items()} for label, done in found.items()
    }
    return Part(rows, {"job_s": thin, "scale": scale, "panels": panels})


def _programs(seed: int, count: int, *, equal: bool) -> list[Program]:
    users = list(workload.USERS)
    programs = workload.read(seed)[:count]
    return [replace(one, user=users[number % len(users)]) if equal else one for number, one in enumerate(programs)]


def _round(name: str, programs: Sequence[Program], *, at_once: bool) -> Done:
    with TemporaryDirectory(prefix="mfb-") as folder, ExitStack() as stack:
        urls = [stack.enter_context(_engine(Path(folder))) for _ in range(workload.REPLICAS)]
        port = ours.free_port()
        running = stack.enter_context(
            ours.gateway(urls[0], port, module=_MODULES[name], gateway_patience_s=_PATIENCE_S)
        )
        for url in urls:
            replica = NewReplica(wire.MODEL, url, dialects=(Dialect.CHAT,), engine=EngineKind.VLLM)
            model_replicas.add(running.database, replica)
        users = Counter(one.user for one in programs)
        keys = {user: iter(running.tokens(count, user)) for user, count in users.items()}
        tokens = [next(keys[one.user]) for one in programs]
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        return asyncio.run(Running(url, programs, tokens, at_once=at_once).run())


@contextmanager
def _engine(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.gateway.programs.engine"]
    with processes.running(command, log=folder / "engine.log", cwd=contenders.REPOSITORY) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port.isdigit():
            raise RuntimeError(f"the engine did not start: {(folder / 'engine.log').read_text()[-600:]}")
        yield f"http://127.0.0.1:{port}/v1"


# --- Figures --------------------------------------------------------------------------------------------------------


def _job_rows(label: str, seeds: Sequence[int], done: dict[str, list[Done]], *, goal: float | None) -> list[Row]:
    rows = []
    for name, rounds in done.items():
        rows += [
            row(f"{label}: {name}: mean job time", mean(mean(one.job_s) for one in rounds), "s"),
            row(f"{label}: {name}: job time, p50", mean(quantile(one.job_s, 0.5) for one in rounds), "s"),
            row(f"{label}: {name}: job time, p99", mean(quantile(one.job_s, 0.99) for one in rounds), "s"),
            row(f"{label}: {name}: prompt tokens kept from the last call", _cached(rounds), "share"),
        ]
    ratios = [mean(other.job_s) / mean(mine.job_s) for mine, other in zip(done[OURS], done[FIRST_COME], strict=True)]
    rows += [
        row(f"{label}: mean job time, times better: seed {seed}", ratio, "x")
        for seed, ratio in zip(seeds, ratios, strict=True)
    ]
    rows.append(row(f"{label}: mean job time, times better: all seeds", mean(ratios), "x", goal=goal))
    return rows


def _cached(rounds: Sequence[Done]) -> float:
    calls = [call for one in rounds for call in one.calls]
    return sum(call.cached for call in calls) / sum(call.prompt for call in calls)


def _promise_rows(
    label: str, read: Sequence[Sequence[Program]], name: str, rounds: Sequence[Done], *, goals: bool
) -> list[Row]:
    """The worst of the seeds."""
    fair, computed, sticky, refused = [], [], [], []
    for programs, done in zip(read, rounds, strict=True):
        users = [one.user for one in programs]
        fair.append(_fairness(users, done.calls, lambda call: call.tokens))
        computed.append(_fairness(users, done.calls, lambda call: call.tokens - call.cached)[0])
        sticky.append(min(_sticky_shares(done.calls)))
        refused.append(_worst_refused(done))
    mine = (GOAL_JAIN, GOAL_STICKY, GOAL_REFUSED) if goals and name == OURS else (None, None, None)
    fewest = min(seconds for _, seconds in fair)
    at = f"{label}: {name}"
    return [
        row(f"{at}: Jain's index of users' tokens", min(index for index, _ in fair), "", goal=mine[0]),
        row(f"{at}: Jain's index of users' tokens without kept prefixes", min(computed), ""),
        row(f"{at}: seconds in which all users had calls waiting", fewest, "s"),
        row(f"{at}: calls on one replica, of any program", min(sticky), "share", goal=mine[1]),
        row(f"{at}: refused, of any ten seconds", max(refused), "share", goal=mine[2], better="less"),
        row(f"{at}: the longest wait of a call", max(_waits(rounds)), "s"),
    ]


def _fairness(users: Sequence[str], calls: Sequence[DoneCall], count: Callable[[DoneCall], int]) -> tuple[float, float]:
    """Jain's index of users' tokens while every user had a call waiting, and for how long that was so.

    A call's tokens are spread evenly over the time in which its engine worked on it.
    """
    steps: list[tuple[float, str, int, float]] = []  # when, whose, calls waiting more, tokens a second more
    for call in calls:
        user, per_s = users[call.program], count(call) / max(1e-6, call.ended_s - call.began_s)
        steps += [(call.asked_s, user, 1, 0.0), (call.began_s, user, -1, per_s), (call.ended_s, user, 0, -per_s)]
    waiting = dict.fromkeys(users, 0)
    rates = dict.fromkeys(users, 0.0)
    had: defaultdict[str, float] = defaultdict(float)
    before = contested_s = 0.0
    for at, user, more, per_s in sorted(steps):
        if all(waiting.values()):
            contested_s += at - before
            for one, rate in rates.items():
                had[one] += rate * (at - before)
        before = at
        waiting[user] += more
        rates[user] += per_s
    return jain([had[user] for user in rates]), contested_s


def _sticky_shares(calls: Sequence[DoneCall]) -> list[float]:
    """Of each program, the share of its calls on the engine that had most of them."""
    engines: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for call in calls:
        engines[call.program][call.engine] += 1
    return [max(one.values()) / one.total() for one in engines.values()]


def _worst_refused(done: Done) -> float:
    """The largest share of refusals among the answers of any ten seconds that begin with one."""
    answers = sorted([(call.ended_s, 0) for call in done.calls] + [(at, 1) for at in done.refused_s])
    worst = 0.0
    for begin, refused in answers:
        if refused:
            within = [one for at, one in answers if begin <= at < begin + _WINDOW_S]
            worst = max(worst, sum(within) / len(within))
    return worst


def _waits(rounds: Sequence[Done]) -> list[float]:
    return [call.began_s - call.asked_s for one in rounds for call in one.calls]
