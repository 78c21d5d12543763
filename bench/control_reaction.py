"""Part 4, reaction: how long a slot stands empty after its task has ended, while others wait for it.

Measured from the end as the ledger records it to the claim that takes the slot: event, decision, hint, claim.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from bench.control_figures import quantile, vacancies_s
from bench.control_record import Part
from bench.control_system import Say, System, running
from bench.record import Row, row

GOAL_P50_S = 0.050
INSTANCES = 10


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `loads`: slots, and the bounds of a task's seconds."""

    loads: tuple[tuple[int, float, float], ...] = ((100, 1.0, 3.0), (1_000, 5.0, 15.0))
    rounds: int = 2
    for_s: float = 25.0


QUICK = Scale(loads=((100, 0.5, 1.5),), rounds=1, for_s=3.0)


@dataclass(frozen=True, slots=True)
class Reaction:
    """One round: every slot's empty times, in seconds."""

    slots: int
    round: int
    completions_per_s: float
    empty_s: list[float]


def measure(scale: Scale, say: Say) -> Part:
    """Run all rounds. Raises: MegaFlowError, RuntimeError: the stack did not do its work."""
    found = []
    for number in range(scale.rounds):
        for slots, least_s, most_s in scale.loads:
            say(f"round {number + 1} of {scale.rounds}: {slots} slots, tasks of {least_s:g} to {most_s:g} s")
            with running(
                f"uniform:{least_s:g},{most_s:g}",
                persistent_instances=INSTANCES,
                persistent_slots=slots // INSTANCES,
            ) as system:
                system.until_pool_stands(INSTANCES)
                found.append(_react(system, number, slots, least_s, most_s, scale.for_s))
    return Part(_rows(found), {"reactions": found, "scale": scale})


def _react(system: System, number: int, slots: int, least_s: float, most_s: float, for_s: float) -> Reaction:
    """The first generation has begun all at once and ends in a wide spread; what follows it is measured."""
    per_s = 2 * slots / (least_s + most_s)
    wait_s = most_s + for_s
    run = system.submit(slots + int(1.5 * wait_s * per_s))
    time.sleep(wait_s)
    spans = system.spans(run.run_id)
    finished = [span.finished for span in spans if span.finished is not None]
    claimed = [span.claimed for span in spans if span.claimed is not None]
    empty_s = vacancies_s(finished, claimed, slots)
    return Reaction(slots, number, len(finished) / wait_s, empty_s)


def _rows(found: list[Reaction]) -> list[Row]:
    rows = []
    for slots in dict.fromkeys(reaction.slots for reaction in found):
        rounds = [reaction for reaction in found if reaction.slots == slots]
        per_s = median(reaction.completions_per_s for reaction in rounds)
        p50, p99 = (median(quantile(r.empty_s, share) for r in rounds) * 1000 for share in (0.5, 0.99))
        at = f"reaction, {slots} slots, {per_s:.0f} ends/s: end to slot reused"
        rows.append(row(f"{at} p50", p50, "ms", goal=GOAL_P50_S * 1000, better="less"))
        rows.append(row(f"{at} p99", p99, "ms"))
    return rows
