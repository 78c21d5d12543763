"""The scheduler's decisions as pure functions: no I/O, so that a simulator can run the same code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from app.models.spec import Mode

Key = tuple[Mode, str]
T = TypeVar("T")


class Line(NamedTuple):
    """One task in line: an identity of the caller's, the mode it asked for, its resource class."""

    identity: object
    mode: Mode
    resource_class: str


def free_slots(capacity: Mapping[Key, int], live: Mapping[Key, int]) -> Counter[Key]:
    """Slots that nobody holds; never negative (capacity may have shrunk under what runs)."""
    return Counter({key: max(0, total - live.get(key, 0)) for key, total in capacity.items()})


def choose_mode(asked: Mode, resource_class: str, free: Mapping[Key, int]) -> Mode | None:
    """The mode to run in now, or None to wait.

    `auto` takes a free slot of the standing pool, which costs nothing to start, and else an instance of its own.
    """
    options = (Mode.PERSISTENT, Mode.EPHEMERAL) if asked is Mode.AUTO else (asked,)
    return next((mode for mode in options if free.get((mode, resource_class), 0) > 0), None)


def admit(lines: Iterable[Line], free: Counter[Key]) -> list[tuple[object, Mode]]:
    """First come first served within what is free; a task that must wait does not hold up one that need not."""
    left = Counter(free)
    chosen = []
    for line in lines:
        mode = choose_mode(line.mode, line.resource_class, left)
        if mode is not None:
            left[mode, line.resource_class] -= 1
            chosen.append((line.identity, mode))
    return chosen


def missing_ephemeral(unclaimed: Mapping[Key, int], coming: Mapping[Key, int]) -> Counter[Key]:
    """Instances to request so that every dispatched attempt finds one.

    Level-triggered: an instance that fails to boot leaves a gap, and the next look fills it.
    """
    gaps = {key: count - coming.get(key, 0) for key, count in unclaimed.items() if key[0] is Mode.EPHEMERAL}
    return Counter({key: gap for key, gap in gaps.items() if gap > 0})
