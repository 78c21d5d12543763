"""Part 5, idle: thousands of streams that say nothing for a while, and what another call takes meanwhile."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bench.control_figures import quantile
from bench.control_record import Part
from bench.environments.figures import Panel, missing
from bench.gateway import processes
from bench.gateway.contenders import OURS, PROXIES, Contender
from bench.gateway.crew import Crew, Fault
from bench.gateway.load import Told
from bench.gateway.wire import Wish
from bench.record import Row, row

_OPEN_S = 300.0


@dataclass(frozen=True, slots=True)
class Scale:
    streams: int = 2000
    probes: int = 500


QUICK = Scale(streams=200, probes=50)


def measure(scale: Scale, crew: Crew) -> Part:
    rows: list[Row] = []
    found: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)
    for _, contender in crew.turns(1, PROXIES):
        try:
            before, during, finished, per_stream = _held(scale, crew, contender)
        except Fault as fault:
            crew.out(contender, fault)
            continue
        finally:
            crew.release()
        label, goal = f"{scale.streams} idle streams: {contender.name}", scale.streams
        rows += [
            row(f"{label}: finished", finished, "streams", goal=goal if contender.name == OURS else None),
            row(f"{label}: memory of each", per_stream / 1000, "kB"),
            row(f"{label}: another call before, p50", quantile(before.took_s, 0.5) * 1000, "ms"),
            row(f"{label}: another call meanwhile, p50", quantile(during.took_s, 0.5) * 1000, "ms"),
            row(f"{label}: another call meanwhile, p99", quantile(during.took_s, 0.99) * 1000, "ms"),
        ]
        found[contender.name] = {"before_s": before.took_s, "meanwhile_s": during.took_s}
    rows += missing(f"{scale.streams} idle streams", crew.absent, crew.faults)
    shown = {
        f"{name}, {when}": [quantile(values, 0.5) * 1000, quantile(values, 0.99) * 1000]
        for name, told in found.items()
        for when, values in (("no streams", told["before_s"]), ("with them", told["meanwhile_s"]))
    }
    panels = [Panel(f"another call beside {scale.streams} idle streams", "ms", shown, notes=crew.absent | crew.faults)]
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, crew.versions)


def _held(scale: Scale, crew: Crew, contender: Contender) -> tuple[Told, Told, int, float]:
    """Another call before and meanwhile, streams that came to their end, and bytes for each. Raises: Fault."""
    before = _probe(scale, crew, contender)
    empty = processes.resident_bytes(contender.pid)
    crew.say(f"{contender.name}: opening {scale.streams} streams")
    with crew.putting(
        contender, Wish(events=3, hold=True), width=scale.streams, calls=scale.streams, tokens=64
    ) as running:
        running.until_begun(_OPEN_S)
        per_stream = (processes.resident_bytes(contender.pid) - empty) / scale.streams
        during = _probe(scale, crew, contender)
        crew.release()
        told = running.told()
    return before, during, len(told.took_s), per_stream


def _probe(scale: Scale, crew: Crew, contender: Contender) -> Told:
    with crew.putting(contender, Wish(), width=1, calls=scale.probes) as running:
        return running.end()
