"""Figures made of samples: spreads, ratios within a round, bars of a picture. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

from bench.control_figures import quantile
from bench.record import Row, row

Rounds = Sequence[Sequence[float]]
"""Seconds, by round."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars of one picture, on a logarithmic scale: p50 and, where there is one, p99 of everybody."""

    title: str
    unit: str
    bars: Mapping[str, Sequence[float]]
    goal: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    """Who is missing, and why."""


def flat(rounds: Rounds) -> list[float]:
    return list(chain.from_iterable(rounds))


def spread(label: str, rounds: Rounds, *, goal_ms: float | None = None) -> list[Row]:
    """p50, p99 and how many, in milliseconds; the goal is of p50."""
    every = flat(rounds)
    if not every:
        return []
    return [
        row(f"{label}: p50", quantile(every, 0.5) * 1000, "ms", goal=goal_ms, better="less"),
        row(f"{label}: p99", quantile(every, 0.99) * 1000, "ms"),
        row(f"{label}: n", len(every), "samples"),
    ]


def bars(found: Mapping[str, Rounds]) -> dict[str, list[float]]:
    """p50 and p99 of everybody, in milliseconds."""
    every = {name: flat(rounds) for name, rounds in found.items()}
    return {name: [quantile(all_, share) * 1000 for share in (0.5, 0.99)] for name, all_ in every.items() if all_}


def round_ratio(above: Rounds, below: Rounds) -> float | None:
    """The median over rounds of one's p50 to the other's: what disturbs a round disturbs both. None: no such round."""
    pairs = [(one, other) for one, other in zip(above, below, strict=False) if one and other]
    return median(quantile(one, 0.5) / quantile(other, 0.5) for one, other in pairs) if pairs else None


def ratio(metric: str, above: Rounds, below: Rounds, *, goal: float | None = None) -> list[Row]:
    """`round_ratio` as a row, of which less is better; no row when there is none."""
    found = round_ratio(above, below)
    return [] if found is None else [row(metric, found, "x", goal=goal, better="less")]


def fastest(found: Mapping[str, Rounds], names: Iterable[str]) -> str | None:
    """Who of `names` has the least p50; None when none of them was measured."""
    p50s = {name: quantile(flat(found[name]), 0.5) for name in names if name in found and flat(found[name])}
    return min(p50s, key=lambda name: p50s[name], default=None)


def against(
    label: str, found: Mapping[str, Rounds], mine: str, theirs: Iterable[str], *, goal: float | None = None
) -> list[Row]:
    """How many times as long the fastest of `theirs` takes: more is better for us."""
    best = fastest(found, theirs)
    ratio = round_ratio(found[best], found[mine]) if best is not None and mine in found else None
    return [] if ratio is None else [row(f"{label}: {mine}, against {best}", ratio, "x faster", goal=goal)]


def missing(label: str, *reasons: Mapping[str, str]) -> list[Row]:
    """Everybody who could not be measured, each with the reason: nobody is dropped in silence."""
    told = {name: reason for those in reasons for name, reason in those.items()}
    return [Row(f"{label}: {name}: not measured", reason, "") for name, reason in told.items()]
