"""Part 6, burst: a thousand instances asked for at once, and ten thousand slots that empty within seconds.

Launches are timed from a task's acceptance to the moment at which the ledger has its instance's handle, as the
provider gave it. Ends are timed as in part 4, from the end that the ledger records to the claim that takes the slot:
the whole burst ends as fast as the ledger takes ends, with as many tasks waiting behind it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import LiteralString

from app.models.spec import Mode
from bench.control_figures import quantile, vacancies_s
from bench.control_record import Part
from bench.control_system import Say, System, running
from bench.record import Row, row

GOAL_LAUNCH_S, GOAL_P99_S = 1.0, 1.0
SLOTS = 100
"""Of one standing instance."""
_NO_ENDS_S = 60.0
_LAUNCHED: LiteralString = (
    "SELECT count(*) FROM instances WHERE handle IS NOT NULL AND state NOT IN ('terminated', 'failed')"
)


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 3
    launches: int = 1_000
    events: int = 10_000


QUICK = Scale(rounds=1, launches=50, events=500)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of every launch and of every slot that was taken again; `ends_per_s`: how fast the burst was."""

    launch_s: list[float]
    reaction_s: list[float]
    ends_per_s: float


def measure(scale: Scale, say: Say) -> Part:
    """Run all rounds. Raises: MegaFlowError, RuntimeError: the stack did not do its work."""
    found = []
    for number in range(scale.rounds):
        say(f"round {number + 1} of {scale.rounds}: {scale.launches} launches")
        launch_s = _launches(scale.launches)
        say(f"round {number + 1} of {scale.rounds}: {scale.events} ends")
        found.append(Round(launch_s, *_ends(scale.events)))
    return Part(_rows(found, scale), {"rounds": found, "scale": scale})


def _launches(count: int) -> list[float]:
    """Seconds from acceptance until so many instances have a handle, by instance; waves of other tasks went before."""
    with running("constant:60", persistent_instances=0, ephemeral_capacity=2 * count) as system:
        system.behave("constant:0.2")
        system.until_ended(system.submit(min(count, 50), mode=Mode.EPHEMERAL), timeout_s=60)
        system.behave(f"constant:{_NO_ENDS_S:g}")
        run = system.submit(count, mode=Mode.EPHEMERAL)
        accepted = min(span.accepted for span in system.spans(run.run_id))
        seen: list[float] = []
        give_up = time.monotonic() + 60
        while len(seen) < count:
            if time.monotonic() > give_up:
                raise RuntimeError(f"expected {count} instances with a handle within 60 s, found {len(seen)}")
            held = system.number(_LAUNCHED)
            at = (datetime.now(UTC) - accepted).total_seconds()
            seen += [at] * (held - len(seen))
            time.sleep(0.01)
        return seen


def _ends(count: int) -> tuple[list[float], float]:
    """Seconds that each slot stood empty, and the ends per second, of the first of two generations."""
    instances = -(-count // SLOTS)
    with running("constant:1", persistent_instances=instances, persistent_slots=SLOTS) as system:
        system.until_pool_stands(instances)
        system.behave(f"constant:{_ramp_s(count):g}")
        run = system.submit(2 * count)
        system.until("the first generation to run", lambda: system.count("running", run.run_id) >= count, 60)
        system.behave(f"constant:{_NO_ENDS_S:g}")
        system.until("the second generation to run", lambda: _second_runs(system, run.run_id, count), 120)
        spans = system.spans(run.run_id)
        finished = [span.finished for span in spans if span.finished is not None]
        claimed = [span.claimed for span in spans if span.claimed is not None]
        took_s = (max(finished) - min(finished)).total_seconds()
        return vacancies_s(finished, claimed, count), len(finished) / max(took_s, 0.001)


def _ramp_s(count: int) -> float:
    """Longer than the first generation takes to begin."""
    return 5.0 + count / 400


def _second_runs(system: System, run_id: object, count: int) -> bool:
    return (
        system.number("SELECT count(*) FROM tasks WHERE run_id = %s AND state IN ('running', 'succeeded')", [run_id])
        >= 2 * count
    )


def _rows(found: list[Round], scale: Scale) -> list[Row]:
    launched = median(max(one.launch_s) for one in found)
    p50, p99 = (median(quantile(one.reaction_s, share) for one in found) for share in (0.5, 0.99))
    at = f"burst, {scale.events} ends at {median(one.ends_per_s for one in found):.0f}/s: end to slot reused"
    metric = f"burst, {scale.launches} instances: accepted to the last launched"
    return [
        row(metric, launched, "s", goal=GOAL_LAUNCH_S, better="less"),
        row(f"{at} p50", p50, "s"),
        row(f"{at} p99", p99, "s", goal=GOAL_P99_S, better="less"),
    ]
