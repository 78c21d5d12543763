"""Pass rates with intervals that hold what they say, pass@k, paired differences, replicas needed."""

from __future__ import annotations

import math
import random

import pytest
from scipy.stats import binomtest

from app.evaluation import statistics


def groups(*counts: tuple[int, int]) -> dict[str, list[bool]]:
    """Tasks with so many solved of so many replicas."""
    return {f"t{index}": [True] * solved + [False] * (n - solved) for index, (solved, n) in enumerate(counts)}


def test_one_replica_each_has_wilsons_interval() -> None:
    found = statistics.pass_rate(groups(*[(1, 1)] * 30, *[(0, 1)] * 70))
    expected = binomtest(30, 100).proportion_ci(0.95, "wilson")
    assert found is not None
    assert found.method == "Wilson"
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_without_a_scored_task_there_is_no_rate() -> None:
    assert statistics.pass_rate({}) is None
    assert statistics.pass_rate({"a": []}) is None


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_or_nothing_is_no_certainty(rate: float) -> None:
    found = statistics.pass_rate(groups(*[(int(4 * rate), 4)] * 10))
    assert found is not None
    assert found.high - found.low > 0.02


def test_replicas_that_agree_add_no_certainty_about_other_tasks() -> None:
    once = statistics.pass_rate(groups(*[(1, 1)] * 20, *[(0, 1)] * 20))
    often = statistics.pass_rate(groups(*[(8, 8)] * 20, *[(0, 8)] * 20))
    assert once is not None
    assert often is not None
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.1)


@pytest.mark.parametrize(("mean", "spread"), [(0.5, 2.0), (0.25, 1.0), (0.1, 3.0)])
@pytest.mark.parametrize("replicas", [1, 4])
def test_the_interval_holds_the_truth_in_95_of_100_runs(mean: float, spread: float, replicas: int) -> None:
    draw = random.Random(7)
    tries, held = 1500, 0
    for _ in range(tries):
        rates = [draw.betavariate(mean * spread, (1 - mean) * spread) for _ in range(120)]
        made = {str(n): [draw.random() < rate for _ in range(replicas)] for n, rate in enumerate(rates)}
        found = statistics.pass_rate(made)
        assert found is not None
        held += found.low <= mean <= found.high
    assert 0.93 <= held / tries <= 0.97


def test_pass_at_k_and_pass_hat_k_are_the_unbiased_ones() -> None:
    made = groups((2, 4), (0, 4), (4, 4))
    assert statistics.pass_at(1, made) == pytest.approx(0.5)
    assert statistics.pass_at(2, made) == pytest.approx((1 - 1 / 6 + 0 + 1) / 3)
    assert statistics.pass_hat(2, made) == pytest.approx((1 / 6 + 0 + 1) / 3)
    assert statistics.pass_at(5, made) is None


def test_flips_are_listed_and_tested() -> None:
    first = groups(*[(1, 1)] * 10, *[(0, 1)] * 10)
    second = {**first, "t0": [False], "t10": [True], "t11": [True]}
    found = statistics.paired(first, second)
    assert found is not None
    assert (found.only_first, found.only_second) == (("t0",), ("t10", "t11"))
    assert found.difference.value == pytest.approx(0.05)
    assert found.difference.low < 0 < found.difference.high
    assert found.mcnemar_p == pytest.approx(1.0)


@pytest.mark.parametrize(("tasks", "replicas"), [(1, 1), (2, 1), (5, 1), (1, 4), (2, 4), (5, 4)])
def test_equal_differences_of_few_tasks_are_no_certainty(tasks: int, replicas: int) -> None:
    lost, solved = groups(*[(0, replicas)] * tasks), groups(*[(replicas, replicas)] * tasks)
    for first, second, value in ((lost, solved, 1.0), (solved, lost, -1.0), (lost, lost, 0.0)):
        found = statistics.paired(first, second)
        assert found is not None
        assert found.difference.low <= value <= found.difference.high
        assert found.difference.high - found.difference.low > 0.2
        assert tasks == 5 or value == 0 or found.difference.low < 0 < found.difference.high


def test_bonett_and_prices_interval_is_as_published() -> None:
    first = groups(*[(1, 1)] * 7, *[(0, 1)] * 43)
    second = groups(*[(0, 1)] * 2, *[(1, 1)] * 5, *[(1, 1)] * 8, *[(0, 1)] * 35)
    found = statistics.paired(first, second)
    gained, lost = 9 / 52, 3 / 52
    half = 1.959964 * math.sqrt((gained + lost - (gained - lost) ** 2) / 52)
    assert found is not None
    bounds = (found.difference.low, found.difference.high)
    assert bounds == pytest.approx((gained - lost - half, gained - lost + half), abs=1e-6)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("tasks", [10, 60])
def test_a_paired_interval_holds_the_truth_in_95_of_100_comparisons(tasks: int, replicas: int) -> None:
    draw = random.Random(5)
    tries, held = 800, 0
    for _ in range(tries):
        rates = [0.8 * draw.betavariate(1, 1) for _ in range(tasks)]
        runs = [
            {str(n): [draw.random() < rate + more for _ in range(replicas)] for n, rate in enumerate(rates)}
            for more in (0.0, 0.2)
        ]
        found = statistics.paired(*runs)
        assert found is not None
        held += found.difference.low <= 0.2 <= found.difference.high
    assert 0.93 <= held / tries <= 0.995


def test_runs_without_a_common_task_are_not_compared() -> None:
    assert statistics.paired({"a": [True]}, {"b": [True]}) is None


def test_a_smaller_difference_takes_more_replicas_until_only_more_tasks_help() -> None:
    draw = random.Random(3)
    first = {str(n): [draw.random() < 0.5 for _ in range(4)] for n in range(400)}
    second = {str(n): [draw.random() < 0.5 for _ in range(4)] for n in range(400)}
    needed = [statistics.replicas_needed(first, second, one) for one in (0.10, 0.05)]
    assert needed[0] is not None
    assert needed[1] is not None
    assert needed[0] < needed[1]
    z = 1.959964 + 0.841621
    assert needed[1] == pytest.approx(0.5 / (400 * (0.05 / z) ** 2), rel=0.35)
    apart = {str(n): [n % 2 == 0] * 4 for n in range(400)}
    assert statistics.replicas_needed(apart, {n: [not one[0]] * 4 for n, one in apart.items()}, 0.001) is None
    assert math.isfinite(needed[1])
