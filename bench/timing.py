"""What was timed, and the figures made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Batch:
    """`tasks` tasks of one variant, `width` at a time. Seconds.

    `took_s` has each task's own time where tasks went one at a time, `phases` the attempts' recorded times (ours only).
    """

    variant: str
    width: int
    tasks: int
    wall_s: float
    took_s: list[float]
    phases: list[dict[str, float]]

    @property
    def slot_s(self) -> float:
        """What one task cost one of the `width` slots."""
        return self.wall_s * self.width / self.tasks


def timed(variant: str, work: Callable[[], None], count: int, width: int) -> Batch:
    """Do `work` `count` times, `width` at a time."""
    took: list[float] = []

    def once(_: int) -> None:
        begun = time.monotonic()
        work()
        took.append(time.monotonic() - begun)

    begun = time.monotonic()
    with ThreadPoolExecutor(width) as pool:
        for _ in pool.map(once, range(count)):
            pass
    return Batch(variant, width, count, time.monotonic() - begun, took, [])


def of(batches: Sequence[Batch], variant: str, width: int) -> list[Batch]:
    return [batch for batch in batches if batch.variant == variant and batch.width == width]


def slot_median_s(batches: Sequence[Batch], variant: str, width: int) -> float:
    """The median over rounds of what one task cost a slot."""
    return median(batch.slot_s for batch in of(batches, variant, width))


def phase_medians_s(batches: Sequence[Batch], variant: str, width: int) -> dict[str, float]:
    """Median seconds of every span, over all tasks of a variant, in the order of the way."""
    spans: dict[str, list[float]] = {}
    for batch in of(batches, variant, width):
        for phases in batch.phases:
            for name, seconds in phases.items():
                spans.setdefault(name, []).append(seconds)
    return {name: median(found) for name, found in spans.items()}


def not_ours(width: int) -> set[str]:
    """Spans that are no cost of a task's own: a sum of others, and, where tasks go together, waiting for a slot."""
    return {"claim", "accepted → admitted"} if width > 1 else {"claim"}
