"""Part 4, memory: what a gateway holds in RAM after very many calls, each in the ledger (ours) in the end."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from bench.control_record import Part
from bench.environments.figures import Panel, missing
from bench.gateway import processes
from bench.gateway.contenders import LITELLM, OURS, PROXIES, Contender
from bench.gateway.crew import Crew, Fault
from bench.gateway.wire import Wish
from bench.record import Row, row

GOAL_TIMES = 1.1
"""Less growth than this cannot be told from what an allocator keeps for itself."""
_BATCHES = 20
_WRITTEN_S = 120.0
_SETTLED_S = 1.0


@dataclass(frozen=True, slots=True)
class Scale:
    calls: int = 100_000
    peers_calls: int = 20_000
    width: int = 64
    calls_per_attempt: int = 100


QUICK = Scale(calls=5_000, peers_calls=1_000, calls_per_attempt=25)


def measure(scale: Scale, crew: Crew) -> Part:
    rows: list[Row] = []
    found: defaultdict[str, list[float]] = defaultdict(list)
    wanted = {OURS: scale.calls, LITELLM: scale.peers_calls}
    for _, contender in crew.turns(1, PROXIES):
        calls = wanted[contender.name]
        before = _settled(contender)
        try:
            found[contender.name] = _resident(scale, crew, contender, calls)
        except Fault as fault:
            crew.out(contender, fault)
            continue
        early, late = found[contender.name][_BATCHES // 5 - 1], found[contender.name][-1]
        label, goal = f"{calls} calls: {contender.name}", GOAL_TIMES if contender.name == OURS else None
        rows += [
            row(f"{label}: memory after a fifth", early, "MB"),
            row(f"{label}: memory at the end", late, "MB"),
            row(f"{label}: memory at the end, against after a fifth", late / early, "x", goal=goal, better="less"),
        ]
        if contender.recorded is not None:
            rows.append(
                row(
                    f"{label}: not in the ledger", _unwritten(contender, before + calls), "calls", goal=0, better="less"
                )
            )
    rows += missing("memory", crew.absent, crew.faults)
    shown = {name: [values[_BATCHES // 5 - 1], values[-1]] for name, values in found.items() if values}
    panels = [Panel("memory: bar after a fifth of the calls, line at their end", "MB", shown)]
    return Part(rows, {"resident_mb": found, "scale": scale, "panels": panels}, crew.versions)


def _resident(scale: Scale, crew: Crew, contender: Contender, calls: int) -> list[float]:
    """Megabytes after every twentieth of the calls; each batch is of other attempts. Raises: Fault."""
    each, found = calls // _BATCHES, []
    for number in range(_BATCHES):
        crew.say(f"{contender.name}: {number * each} of {calls} calls")
        with crew.putting(
            contender,
            Wish(),
            width=scale.width,
            calls=each,
            tokens=max(scale.width, each // scale.calls_per_attempt),
            calls_per_token=scale.calls_per_attempt,
        ) as running:
            running.end()
        found.append(processes.resident_bytes(contender.pid) / 1e6)
    return found


def _settled(contender: Contender) -> int:
    """Calls in the ledger, once those of earlier parts are all there."""
    if contender.recorded is None:
        return 0
    found, last = contender.recorded(), -1
    while found != last:
        time.sleep(_SETTLED_S)
        found, last = contender.recorded(), found
    return found


def _unwritten(contender: Contender, wanted: int) -> int:
    """Calls that have not come into the ledger, however long it was waited for."""
    assert contender.recorded is not None
    give_up = time.monotonic() + _WRITTEN_S
    while (lacking := wanted - contender.recorded()) > 0 and time.monotonic() < give_up:
        time.sleep(0.5)
    return lacking
