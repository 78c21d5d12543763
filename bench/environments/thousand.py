"""Part 6, thousand: a thousand environments used for four commands each, 16 at a time; and 200 alive at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

from bench.control_record import Part
from bench.environments.contenders import OURS, RAW
from bench.environments.crew import Crew
from bench.environments.figures import Panel, bars, missing, spread
from bench.record import Row, row

WIDTH = 16
COMMANDS = ["printf 'print(6 * 7)\\n' > /tmp/x.py", "cat /tmp/x.py", "python3 /tmp/x.py", "rm /tmp/x.py"]
MEBI = 1 << 20
_LONG_S = 1800.0


@dataclass(frozen=True, slots=True)
class Scale:
    count: int = 1_000
    alive: int = 200


QUICK = Scale(count=6, alive=4)


def measure(scale: Scale, crew: Crew) -> Part:
    crowds: dict[str, dict[str, Any]] = {}
    alive: dict[str, dict[str, Any]] = {}
    for _, name in crew.turns(1, [*OURS, RAW]):
        told = crew.ask(name, "crowd", count=scale.count, width=WIDTH, commands=COMMANDS, timeout_s=_LONG_S)
        if told is not None:
            crowds[name] = told | {"left": _left(crew, name)}
    for _, name in crew.turns(1, [*OURS, RAW]):
        if (told := _alive(crew, name, scale.alive)) is not None:
            alive[name] = told
    rows: list[Row] = []
    for name, told in crowds.items():
        rows += _crowd_rows(name, told, scale.count)
    for name, told in alive.items():
        rows += _alive_rows(name, told, scale.alive)
    rows += missing("thousand", crew.absent, crew.faults)
    panels = [
        Panel(
            f"a life with four commands, {WIDTH} at a time", "ms", bars({n: [t["took_s"]] for n, t in crowds.items()})
        ),
        Panel(
            f"memory of one idle environment, {scale.alive} alive",
            "MiB",
            {name: [max(told["each_bytes"], 1) / MEBI] for name, told in alive.items()},
        ),
    ]
    return Part(rows, {"crowds": crowds, "alive": alive, "scale": scale, "panels": panels}, crew.versions)


def _left(crew: Crew, name: str) -> int | None:
    """By the engine's own list, and by a sweep of ours."""
    in_engine = crew.ask(name, "left")
    swept = crew.ask(name, "swept") if name in OURS else {"left": 0}
    return None if in_engine is None or swept is None else int(in_engine["left"]) + int(swept["left"])


def _alive(crew: Crew, name: str, count: int) -> dict[str, Any] | None:
    before = psutil.virtual_memory().available
    if (told := crew.ask(name, "open", count=count, width=WIDTH, timeout_s=_LONG_S)) is None:
        return None
    used = before - psutil.virtual_memory().available
    steps = crew.ask(name, "flood", seconds=1.0)
    crew.ask(name, "close", gently=False)
    return {
        "opened": len(told["took_s"]),
        "each_bytes": used / count,
        "answered": steps is not None,
        "reason": told["reason"],
    }


def _crowd_rows(name: str, told: dict[str, Any], count: int) -> list[Row]:
    ours = name in OURS
    label = f"thousand: {name}"
    rows = [
        row(f"{label}: {count} lives", told["wall_s"], "s"),
        row(f"{label}: lives", count / told["wall_s"], "1/s"),
        *spread(f"{label}: a life", [told["took_s"]]),
        row(f"{label}: client CPU of a life", 1000 * told["cpu_s"], "ms"),
        row(f"{label}: success", 1 - told["failed"] / count, "share", goal=1.0 if ours else None),
    ]
    if told["failed"]:
        rows.append(Row(f"{label}: failed", told["reason"], ""))
    if told["left"] is not None:
        rows.append(row(f"{label}: left", told["left"], "objects", goal=0 if ours else None, better="less"))
    return rows


def _alive_rows(name: str, told: dict[str, Any], count: int) -> list[Row]:
    label = f"{count} alive: {name}"
    opened = told["opened"] if told["answered"] else 0
    return [
        row(f"{label}: alive at once, all answering", opened, "environments", goal=count if name in OURS else None),
        row(f"{label}: memory of each", told["each_bytes"] / MEBI, "MiB"),
    ]
