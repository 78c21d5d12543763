"""The goals, held against what was measured: which are met, which are missed, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Kept = Mapping[str, Any]
"""What `control_record.load` gives: every part that was kept, by name."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal and what was found. `holds` None: its part has not been measured."""

    part: str
    metric: str
    value: float | None
    goal: float
    unit: str
    holds: bool | None


def verdicts(kept: Kept) -> Iterator[Verdict]:
    """Every goal of every part that was kept, in the parts' order."""
    for part, told in kept.items():
        for item in told["rows"]:
            if item["goal"] is not None:
                yield Verdict(part, item["metric"], item["value"], item["goal"], item["unit"], item["holds"])


def unmeasured(kept: Kept) -> list[tuple[str, str]]:
    """Who could not be measured, with the reason; once each."""
    ending = ": not measured"
    found = {
        item["metric"].removesuffix(ending): str(item["value"])
        for told in kept.values()
        for item in told["rows"]
        if item["metric"].endswith(ending)
    }
    return list(found.items())


def summary(kept: Kept) -> str:
    """How many of the goals hold."""
    found = list(verdicts(kept))
    return f"{sum(bool(verdict.holds) for verdict in found)} of {len(found)} goals met"
