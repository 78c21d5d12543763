"""Pure arithmetic of the control plane's benchmark: quantiles, Jain's index, who waited how long for a free slot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed. An observed one, never an interpolation."""
    if not values:
        raise ValueError("expected at least one value")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def jain(shares: Sequence[float]) -> float:
    """How evenly `shares` are spread: 1 when all are equal, 1/n when one has everything. Nobody has anything: 1.

    Source: Jain, Chiu, Hawe: A quantitative measure of fairness (1984).
    """
    if not shares:
        raise ValueError("expected at least one share")
    squares = sum(share * share for share in shares)
    return 1.0 if squares == 0 else sum(shares) ** 2 / (len(shares) * squares)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of ours to theirs: what disturbs a round disturbs both sides of its ratio."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


def vacancies_s(finished: Sequence[datetime], claimed: Sequence[datetime], slots: int) -> list[float]:
    """Seconds that each slot stood empty: the k-th completion's slot is taken by claim number `slots` + k.

    Slots are alike, so that it does not matter which of several free ones a claim took. The first `slots` claims
    filled empty slots and follow no completion; what was never taken again is left out.
    """
    refills = sorted(claimed)[slots:]
    return [(taken - freed).total_seconds() for freed, taken in zip(sorted(finished), refills, strict=False)]


def most_at_once(spans: Sequence[tuple[datetime, datetime]]) -> int:
    """The largest number of spans that were open at one moment; one that ends when another begins makes room."""
    steps = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    running = most = 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most


def contested_until(starts: Mapping[str, Sequence[datetime]], total: Mapping[str, int]) -> datetime | None:
    """The last moment at which every user still had work waiting: when the first of them started its last task.

    None: nobody has started everything.
    """
    ends = [max(times) for user, times in starts.items() if len(times) >= total[user]]
    return min(ends) if ends else None
