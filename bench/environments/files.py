"""Part 4, files: one file of 1 MB and one of 100 MB, in and out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bench.control_record import Part
from bench.environments.contenders import BARE, CONTENDERS, OURS, PEERS
from bench.environments.crew import Crew
from bench.environments.figures import Panel, against, bars, missing, spread
from bench.record import Row, row

MEGABYTE = 1_000_000
WAYS = ("in", "out")


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 3
    counts: tuple[tuple[int, int], ...] = ((1, 10), (100, 2))
    """Megabytes, and how often in a round."""


QUICK = Scale(rounds=1, counts=((1, 2), (10, 1)))


def measure(scale: Scale, crew: Crew) -> Part:
    found: dict[str, defaultdict[str, list[list[float]]]] = {}
    absent: dict[str, str] = {}
    names = [name for name in CONTENDERS if name != BARE and crew.ask(name, "open", count=1, width=1) is not None]
    for _, name in crew.turns(scale.rounds, names):
        for megabytes, count in scale.counts:
            if (told := crew.ask(name, "files", size_bytes=megabytes * MEGABYTE, count=count)) is None:
                break
            for way in WAYS:
                if told[f"{way}_s"]:
                    found.setdefault(f"{megabytes} MB {way}", defaultdict(list))[name].append(told[f"{way}_s"])
            absent |= {f"{name}, {way}": reason for way, reason in told["absent"].items()}
    for name in names:
        crew.ask(name, "close", gently=False)
    rows: list[Row] = []
    for what, took in found.items():
        for name in took:
            rows += spread(f"files: {what}: {name}", took[name])
        for mine in OURS:
            rows += against(f"files: {what}", took, mine, PEERS, goal=1.0)
    rows += [row("files: rounds", scale.rounds, "rounds"), *missing("files", crew.absent, crew.faults, absent)]
    notes = crew.absent | crew.faults | absent
    panels = [Panel(what, "ms", bars(took), notes=notes) for what, took in found.items()]
    return Part(rows, {"took_s": found, "scale": scale, "panels": panels}, crew.versions)
