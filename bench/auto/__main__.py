"""Mode `auto` against every fixed mode: cost at equal p95, in virtual time.

    python -m bench.auto      (a few seconds; writes results/auto.json)

A standing pool of 0 to 100 instances with four slots follows its backlog and keeps idle ones for a minute; ephemeral
instances are another provider's spot machines, for 0.4 of the price. Both boot for a minute. Interruptions of spot
machines are not simulated here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.models.spec import Mode
from app.simulation import virtual
from app.simulation.virtual import VirtualFleet, VirtualOutcome, VirtualTask
from bench import control_record
from bench.auto import workloads
from bench.control_record import Part
from bench.record import RESULTS, Row, row

SHARE = 0.95
EQUAL = 1.02
"""A p95 of at most so much of another one's is taken for the same."""
SPOT = 0.4
FLEET = VirtualFleet(
    ephemeral=10_000,
    pool=100,
    pool_min=0,
    slots=4,
    boot_s=60.0,
    cooldown_s=60.0,
    usd_per_hour={Mode.EPHEMERAL: SPOT, Mode.PERSISTENT: 1.0},
)
FIXED = (Mode.EPHEMERAL, Mode.PERSISTENT)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload in every mode: dollars and the p95 of its tasks' latencies in seconds."""

    workload: str
    usd: dict[str, float]
    p95_s: dict[str, float]

    @property
    def saved(self) -> float:
        """What `auto` saves of the cheapest fixed mode's cost."""
        return 1 - self.usd[Mode.AUTO] / min(self.usd[mode] for mode in FIXED)

    @property
    def slower(self) -> float:
        """The p95 of `auto` to the best of the fixed ones."""
        return self.p95_s[Mode.AUTO] / min(self.p95_s[mode] for mode in FIXED)


def compare(name: str, tasks: Sequence[VirtualTask], fleet: VirtualFleet = FLEET) -> Comparison:
    """Run the workload in each mode."""
    found: dict[str, VirtualOutcome] = {
        mode: virtual.run([replace(task, mode=mode) for task in tasks], fleet) for mode in (*FIXED, Mode.AUTO)
    }
    return Comparison(
        name,
        {mode: outcome.cost_usd for mode, outcome in found.items()},
        {mode: outcome.latency_s(SHARE) for mode, outcome in found.items()},
    )


def main(folder: Path = RESULTS) -> int:
    """Compare all, write, print."""
    begun = time.monotonic()
    found = [compare(name, tasks) for name, tasks in workloads.load().items()]
    rows: list[Row] = []
    for one in found:
        at = f"auto, {one.workload}"
        rows += [row(f"{at}: cost, {mode}", usd, "USD") for mode, usd in one.usd.items()]
        rows.append(row(f"{at}: saved of the cheapest fixed mode", 100 * one.saved, "%", goal=0.01))
        rows.append(row(f"{at}: p95 to the best fixed mode's", one.slower, "x", goal=EQUAL, better="less"))
    part = Part(rows, {"found": found})
    control_record.keep(folder / "auto.json", "auto", part, busy=0.0, took_s=time.monotonic() - begun)
    for item in rows:
        sys.stdout.write(f"{item.metric}: {item.value:g} {item.unit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
