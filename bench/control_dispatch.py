"""Part 2, dispatch: from accepted to claimed.

Three questions. How many attempts a second when thousands of slots are free; how long one task waits for its claim in
an idle system; and whether that stays so while thousands of another user's tasks wait in line: their quota is used up
by a few that run, so the dispatcher has to pass over the others at every decision.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from app.client import MegaFlow
from app.ledger.accept import Accepted
from app.models.spec import Mode
from bench.control_figures import quantile
from bench.control_record import Part
from bench.control_system import Say, Span, System, running
from bench.record import Row, row

GOAL_PER_S = 1500.0
GOAL_IDLE_P50_S = 0.025
GOAL_FLAT = 2.0
CROWD, PROBE = "crowd", "probe"
HOUR = "constant:3600"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rounds: int = 3
    burst: int = 5_000
    """Tasks accepted at once, with as many free slots."""
    burst_run_s: float = 12.0
    """So long that nothing ends while the last are still claimed."""
    probes: int = 150
    """Single tasks per round and length of the line, one after the other."""
    waiting: tuple[int, ...] = (0, 10, 100, 1_000, 10_000)
    modes: tuple[Mode, ...] = (Mode.PERSISTENT, Mode.EPHEMERAL)
    """Of the bursts."""


QUICK = Scale(rounds=1, burst=500, burst_run_s=1.5, probes=30, waiting=(0, 1_000), modes=(Mode.PERSISTENT,))


@dataclass(frozen=True, slots=True)
class Burst:
    """`tasks` claimed within `took_s`, from the first accepted on."""

    mode: str
    round: int
    tasks: int
    took_s: float
    p50_s: float

    @property
    def per_s(self) -> float:
        return self.tasks / self.took_s


@dataclass(frozen=True, slots=True)
class Probes:
    """How long single tasks waited for their claim, while `waiting` others were in line."""

    waiting: int
    round: int
    claim_s: list[float]


def measure(scale: Scale, say: Say) -> Part:
    """Run all rounds. Raises: MegaFlowError, RuntimeError: the stack did not do its work."""
    bursts = [burst for mode in scale.modes for burst in _bursts(scale, mode, say)]
    probes = _probes(scale, say)
    return Part(_rows(bursts, probes), {"bursts": bursts, "probes": probes, "scale": scale})


# --- Bursts ---------------------------------------------------------------------------------------------------------


def _bursts(scale: Scale, mode: Mode, say: Say) -> list[Burst]:
    found: list[Burst] = []
    pool = {"persistent_instances": 50, "persistent_slots": scale.burst // 50}
    sizes = pool if mode is Mode.PERSISTENT else {"persistent_instances": 0, "ephemeral_capacity": scale.burst}
    with running(f"constant:{scale.burst_run_s:g}", **sizes) as system:
        if mode is Mode.PERSISTENT:
            system.until_pool_stands(50)
        _warm(system, mode)
        for number in range(scale.rounds):
            say(f"round {number + 1} of {scale.rounds}: {scale.burst} {mode.value} tasks at once")
            run = system.submit(scale.burst, mode=mode)
            system.until_ended(run, timeout_s=scale.burst_run_s + 120)
            found.append(_burst(mode, number, system.spans(run.run_id)))
    return found


def _burst(mode: Mode, number: int, spans: list[Span]) -> Burst:
    claimed = [span.claimed for span in spans if span.claimed is not None]
    took_s = (max(claimed) - min(span.accepted for span in spans)).total_seconds()
    return Burst(mode.value, number, len(claimed), took_s, quantile([span.claim_s for span in spans], 0.5))


def _warm(system: System, mode: Mode) -> None:
    system.until_ended(system.submit(20, mode=mode), timeout_s=60)


# --- Probes ---------------------------------------------------------------------------------------------------------


def _probes(scale: Scale, say: Say) -> list[Probes]:
    """The line grows from level to level, then it is cancelled and grows again: rounds are interleaved."""
    found: list[Probes] = []
    with running(HOUR, persistent_instances=2, persistent_slots=20) as system:
        system.until_pool_stands(2)
        system.connection.execute("INSERT INTO quotas (user_name, running) VALUES (%s, 4)", [CROWD])
        for number in range(scale.rounds):
            crowd: list[Accepted] = []
            waiting = 0
            for level in scale.waiting:
                if level:
                    system.behave(HOUR)
                    crowd.append(system.submit(level - waiting if waiting else level + 4, user=CROWD, name=CROWD))
                    waiting = level
                    _until_crowd_is_bound(system, crowd)
                system.behave("constant:0.01")
                say(f"round {number + 1} of {scale.rounds}: one task at a time while {level} wait")
                found.append(Probes(level, number, _one_at_a_time(system, scale.probes)))
            _send_home(system, crowd)
    return found


def _until_crowd_is_bound(system: System, crowd: list[Accepted]) -> None:
    runs = [run.run_id for run in crowd]
    system.until("the crowd to use up its quota", lambda: system.count("running", *runs) == 4, timeout_s=60)


def _one_at_a_time(system: System, count: int) -> list[float]:
    runs = []
    for number in range(count):
        run = system.submit(1, user=PROBE, name=PROBE)
        runs.append(run.run_id)
        system.until("a probe's end", lambda run=run: system.count("succeeded", run.run_id) == 1, 30, poll_s=0.01)  # type: ignore[misc]
        time.sleep(0.011 * (number % 3))  # not in step with anybody's period
    return [span.claim_s for span in system.spans(*runs)]


def _send_home(system: System, crowd: list[Accepted]) -> None:
    with MegaFlow(system.stack.settings) as flow:
        for run in crowd:
            flow.cancel(run.task_ids)
    for run in crowd:
        system.until_ended(run, timeout_s=90)


# --- Figures --------------------------------------------------------------------------------------------------------


def _rows(bursts: list[Burst], probes: list[Probes]) -> list[Row]:
    rows = []
    for mode in dict.fromkeys(burst.mode for burst in bursts):
        found = [burst for burst in bursts if burst.mode == mode]
        per_s, p50_s = median(b.per_s for b in found), median(b.p50_s for b in found)
        at = f"dispatch, {found[0].tasks} {mode} tasks at once"
        rows.append(row(f"{at}: accepted to claimed", per_s, "attempts/s", goal=GOAL_PER_S))
        rows.append(row(f"{at}: p50", p50_s * 1000, "ms"))
    p99s: dict[int, float] = {}
    for waiting in sorted({probe.waiting for probe in probes}):
        # The median over rounds of each round's p99: one disturbed round is not the system.
        found_s = [probe.claim_s for probe in probes if probe.waiting == waiting]
        p50, p99s[waiting] = (median(quantile(claim_s, share) for claim_s in found_s) * 1000 for share in (0.5, 0.99))
        goal = None if waiting else GOAL_IDLE_P50_S * 1000
        label = f"dispatch, {waiting} waiting" if waiting else "dispatch, idle"
        rows.append(row(f"{label}: accepted to claimed p50", p50, "ms", goal=goal, better="less"))
        rows.append(row(f"{label}: accepted to claimed p99", p99s[waiting], "ms"))
    if (levels := sorted(level for level in p99s if level))[1:]:
        ratio = p99s[levels[-1]] / p99s[levels[0]]
        rows.append(
            row(f"dispatch: p99, {levels[-1]} waiting to {levels[0]}", ratio, "x", goal=GOAL_FLAT, better="less")
        )
    return rows
