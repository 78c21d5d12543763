"""Statistics of pass rates: intervals, pass@k, paired differences, and how many replicas a difference needs. No I/O.

Replicas of one task are not independent, so tasks are the sample: with replicas an interval is clustered by task.
Source: Miller, "Adding error bars to evals" (arXiv 2411.00640); Chen et al., pass@k (arXiv 2107.03374); Wilson 1927;
Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data",
Journal of Educational and Behavioral Statistics 37 (2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from app.models.spec import Wire

CONFIDENCE = 0.95
Groups = Mapping[str, Sequence[bool]]
"""Results by task: for each scored replica, whether it was solved."""


class Rate(Wire):
    """An estimate with the bounds of its 95 % interval, and the method of computing it."""

    value: float
    low: float
    high: float
    method: str


def pass_rate(groups: Groups) -> Rate | None:
    """Returns the share of solved tasks; None if no task was scored.

    One replica per task: Wilson's interval. Several: Wilson's with the effective sample size that the spread between
    tasks shows, and Student's quantile for the number of tasks.
    """
    scored = [solved for solved in groups.values() if solved]
    if not scored:
        return None
    count = len(scored)
    if all(len(solved) == 1 for solved in scored):
        return _wilson(sum(solved[0] for solved in scored) / count, count, _normal(), "Wilson")
    rates = [sum(solved) / len(solved) for solved in scored]
    rate = sum(rates) / count
    replicas = sum(len(solved) for solved in scored)
    sample: float = count
    if count > 1 and 0 < rate < 1:
        variance = sum((one - rate) ** 2 for one in rates) / (count - 1) / count
        sample = min(rate * (1 - rate) / variance, replicas) if variance > 0 else replicas
    quantile = _student(count - 1) if count > 1 else _normal()
    return _wilson(rate, sample, quantile, "clustered by task")


def _normal() -> float:
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def _student(freedom: int) -> float:
    from scipy.special import stdtrit  # imports in a third of the time of scipy.stats

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _wilson(rate: float, sample: float, quantile: float, method: str) -> Rate:
    square = quantile**2
    middle = (rate + square / (2 * sample)) / (1 + square / sample)
    half = quantile * math.sqrt(rate * (1 - rate) / sample + square / (4 * sample**2)) / (1 + square / sample)
    return Rate(value=rate, low=max(0.0, middle - half), high=min(1.0, middle + half), method=method)


def pass_at(k: int, groups: Groups) -> float | None:
    """Returns pass@k: the chance that at least one of k replicas solves a task. None: no task has k replicas."""
    chances = [1 - _all_of(len(one) - sum(one), len(one), k) for one in groups.values() if len(one) >= k]
    return sum(chances) / len(chances) if chances else None


def pass_hat(k: int, groups: Groups) -> float | None:
    """Returns pass^k: the chance that all of k replicas solve a task. None: no task has k replicas."""
    chances = [_all_of(sum(one), len(one), k) for one in groups.values() if len(one) >= k]
    return sum(chances) / len(chances) if chances else None


def _all_of(marked: int, count: int, k: int) -> float:
    """Returns the chance that k drawn of `count` are all marked."""
    return math.comb(marked, k) / math.comb(count, k)


class PairedDifference(Wire):
    """Difference of the second run to the first on the tasks of both, and whether it is more than chance."""

    tasks: int
    difference: Rate
    only_first: tuple[str, ...]  # solved by the first alone, in more than half of the replicas
    only_second: tuple[str, ...]
    mcnemar_p: float  # exact, on the flips


def paired(first: Groups, second: Groups) -> PairedDifference | None:
    """Compares task by task; None without a task that both have scored."""
    from scipy.stats import binomtest

    rates = {
        task: (sum(first[task]) / len(first[task]), sum(second[task]) / len(second[task]))
        for task in first.keys() & second.keys()
        if first[task] and second[task]
    }
    if not rates:
        return None
    replicas = min(len(runs[task]) for runs in (first, second) for task in rates)
    interval = _of_differences([now - before for before, now in rates.values()], replicas)
    lost = tuple(sorted(task for task, (before, now) in rates.items() if before > 0.5 >= now))
    gained = tuple(sorted(task for task, (before, now) in rates.items() if now > 0.5 >= before))
    flips = len(lost) + len(gained)
    chance = float(binomtest(len(gained), flips, 0.5).pvalue) if flips else 1.0
    return PairedDifference(
        tasks=len(rates), difference=interval, only_first=lost, only_second=gained, mcnemar_p=chance
    )


def _of_differences(differences: Sequence[float], replicas: int) -> Rate:
    """Returns the mean with its interval. Two tasks are added, one gained and one lost, so few tasks are not certain.

    One replica each: Bonett and Price's. Several: Student's t, where the added tasks differ by one replica only.
    """
    count, mean = len(differences), sum(differences) / len(differences)
    if replicas == 1 and all(one in (-1, 0, 1) for one in differences):
        total = count + 2
        middle = sum(differences) / total
        square = (sum(one**2 for one in differences) + 2) / total - middle**2
        half, method = _normal() * math.sqrt(square / total), "paired by task, Bonett and Price"
    else:
        middle, half, method = mean, math.inf, "paired by task, Student's t"
        if count > 1:
            square = sum((one - mean) ** 2 for one in differences) + 2 / replicas**2
            half = _student(count - 1) * math.sqrt(square / (count - 1) / count)
    return Rate(value=mean, low=max(-1.0, middle - half), high=min(1.0, middle + half), method=method)


def replicas_needed(first: Groups, second: Groups, difference: float, *, power: float = 0.8) -> int | None:
    """Returns the replicas of each task that show `difference` with this power; None: only more tasks would.

    The spread between tasks does not shrink with replicas; the spread within them does.
    """
    both = [task for task in first.keys() & second.keys() if first[task] and second[task]]
    if len(both) < 2 or difference <= 0:
        return None
    rates = [(_smoothed(first[task]), _smoothed(second[task])) for task in both]
    within = sum(a * (1 - a) + b * (1 - b) for a, b in rates) / len(rates)
    mean = sum(b - a for a, b in rates) / len(rates)
    between = sum((b - a - mean) ** 2 for a, b in rates) / (len(rates) - 1)
    have = sum(1 / len(first[task]) + 1 / len(second[task]) for task in both) / (2 * len(both))
    between = max(0.0, between - within * have)
    quantiles = _normal() + NormalDist().inv_cdf(power)
    room = len(both) * (difference / quantiles) ** 2 - between
    return max(1, math.ceil(within / room)) if room > 0 else None


def _smoothed(solved: Sequence[bool]) -> float:
    """Returns a rate that is never exactly 0 or 1, as one replica says nothing about its own spread."""
    return (sum(solved) + 0.5) / (len(solved) + 1)
