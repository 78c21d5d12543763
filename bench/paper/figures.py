"""What is made of the runs: means with intervals, costs, and how full hosts are. Bootstrap as the paper's.

Source: MegaFlow, section 3.1: 100 iterations per data point, 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.paper.data import World
from bench.paper.point import Outcome, Plan

ITERATIONS, LOW, HIGH = 100, 2.5, 97.5
BINS = 50
_SEED = 24


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """Each of the three multiplied."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)


def bootstrap(values: Sequence[float], size: int | None = None) -> Interval:
    """Means of samples with replacement; `size`: of each, by default as many as there are. Raises: ValueError: none."""
    if not values:
        raise ValueError("expected at least one value")
    dice, found = np.random.default_rng(_SEED), np.asarray(values)
    means = [dice.choice(found, size or len(found)).mean() for _ in range(ITERATIONS)]
    low, high = np.percentile(means, (LOW, HIGH))
    return Interval(float(found.mean()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Summary:
    """One point of a figure, in minutes and dollars. `tasks`: of one job; `ran`: that were run for it."""

    name: str
    tasks: int
    ran: int
    scale: float
    wall_s: float
    lost: int
    attempts: int
    total_min: Interval
    longest_min: float
    phases_min: dict[str, Interval]
    startup_min: Interval
    cost_usd: Interval
    instances: int  # of one job


PHASES = ("submission", "scheduling", "boot", "image", "environment", "agent", "rest")


def summary(outcome: Outcome, tasks: int) -> Summary:
    """Of a job of `tasks` tasks, as the outcome's plan ran it, perhaps several times side by side."""
    plan, records = outcome.plan, outcome.records
    per_job = -(-tasks // plan.slots)
    price = plan.host.usd_per_hour * plan.usd_factor / 3600 * per_job
    if plan.interrupted:  # more instances than one per slot: all that were paid for
        price *= len(outcome.instance_s) / plan.instances
    minutes = {name: bootstrap([getattr(one, f"{name}_s") for one in records], tasks).times(1 / 60) for name in PHASES}
    return Summary(
        plan.name,
        tasks,
        plan.tasks,
        plan.scale,
        outcome.wall_s,
        outcome.lost,
        len(records),
        bootstrap(outcome.totals_s, tasks).times(1 / 60),
        max(outcome.totals_s) / 60,
        minutes,
        bootstrap([one.startup_s for one in records], tasks).times(1 / 60),
        bootstrap(outcome.instance_s, per_job).times(price),
        per_job,
    )


def utilisation(outcome: Outcome, world: World) -> dict[str, list[list[float]]]:
    """CPU and memory of the hosts in percent over each one's life: mean, low and high of every bin."""
    curves = [_host(held, life_s, outcome.plan, world) for held, life_s in _lives(outcome)]
    found: NDArray[np.float64] = np.asarray(curves)  # hosts, quantity, bins
    dice = np.random.default_rng(_SEED)
    means = np.asarray([found[dice.integers(0, len(found), len(found))].mean(axis=0) for _ in range(ITERATIONS)])
    low, high = np.percentile(means, (LOW, HIGH), axis=0)
    mean = found.mean(axis=0)
    return {
        name: [mean[place].tolist(), low[place].tolist(), high[place].tolist()]
        for place, name in enumerate(("cpu", "memory"))
    }


def _lives(outcome: Outcome) -> list[tuple[list[Any], float]]:
    return list(zip(outcome.by_instance(), outcome.instance_s, strict=True))


def _host(held: Sequence[Any], life_s: float, plan: Plan, world: World) -> NDArray[np.float64]:
    """One host's bins: unpacking takes processors, an agent takes processors and memory, waiting takes nothing."""
    cpu, memory = np.zeros(BINS), np.zeros(BINS)
    first_s = min(one.claimed_s for one in held)
    for one in held:
        claimed_s = one.boot_s + one.claimed_s - first_s
        image_s = claimed_s + one.image_s
        agent_s = image_s + one.environment_s
        if one.image_s > world.unpack_s:  # it was downloaded
            cpu += world.unpack_cores * _share(image_s - world.unpack_s, image_s, life_s)
        there = _share(agent_s, agent_s + one.agent_s + one.rest_s, life_s)
        cpu += world.agent_cores * there
        memory += world.agent_memory_bytes * there
    return np.asarray([100 * cpu / plan.host.cores, 100 * memory / plan.host.memory_bytes])


def _share(since_s: float, until_s: float, life_s: float) -> NDArray[np.float64]:
    """Which share of each bin lies between two moments of a life."""
    edges = np.linspace(0.0, life_s, BINS + 1)
    inside = np.minimum(edges[1:], until_s) - np.maximum(edges[:-1], since_s)
    shares: NDArray[np.float64] = np.clip(inside, 0.0, None) / (life_s / BINS)
    return shares
