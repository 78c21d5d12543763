"""Which points are run: the paper's axes, and what is tried beyond them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.models.spec import Mode
from bench.paper import data
from bench.paper.data import World
from bench.paper.point import Plan

SCALING, LATENCY, BEYOND = "figure 3", "figure 5", "beyond"
CENTRAL, EPHEMERAL, PERSISTENT, LIMITED = "central", "ephemeral", "persistent", "ephemeral, registry at its limit"
WHOLE = "4 tasks"
"""So begin the names beyond that a goal is about; the others are steps on the way."""
SIZES = (1, 10, 100, 1_000, 2_000, 5_000, 10_000)
LATENCY_TASKS, BEYOND_TASKS = 1_000, 2_000
_LEAST_RUN = 100
"""Small jobs are run side by side until so many tasks have: one draw would be no mean."""


@dataclass(frozen=True, slots=True)
class Job:
    """One point: a job of `tasks`, of which the plan may run several at once."""

    figure: str
    series: str
    tasks: int
    plan: Plan
    utilisation: bool = False


def jobs(world: World, *, quick: bool = False) -> list[Job]:
    """All points, small ones first; `quick`: the smallest of each series, in a hurry."""
    total_min = data.point("3-time", "ephemeral", 1)
    latency_min = data.point("5-latency", "persistent", LATENCY_TASKS)
    alone_s = world.agent_s(total_min, boots=True, cached=False)
    shared_s = world.agent_s(latency_min, boots=False, cached=True)
    found = [_scaling(world, series, tasks, alone_s) for tasks in SIZES for series in (EPHEMERAL, CENTRAL)]
    found += [_scaling(world, PERSISTENT, tasks, shared_s) for tasks in SIZES if tasks < LATENCY_TASKS]
    found += [_scaling(world, LIMITED, tasks, alone_s) for tasks in (1, 100, 1_000, 5_000)]
    found += [
        replace(_scaling(world, series, LATENCY_TASKS, shared_s), figure=LATENCY)
        for series in (PERSISTENT, EPHEMERAL, CENTRAL)
    ]
    kept = [job for job in found if job is not None and _could_run(job, world)] + _beyond(world, alone_s)
    return _hurried(kept) if quick else kept


def _could_run(job: Job, world: World) -> bool:
    return job.series != CENTRAL or job.tasks <= world.central.most * world.central.slots


def _scale(tasks: int) -> float:
    """How much faster than life. Small jobs may hurry: downloads that share a link begin within less of their time."""
    return 900.0 if tasks <= 100 else 300.0 if tasks <= 1_000 else 150.0


def _scaling(world: World, series: str, tasks: int, agent_s: float) -> Job:
    central = series == CENTRAL
    host = world.central if central else world.small
    slots = min(tasks, host.slots)
    side_by_side = max(1, -(-_LEAST_RUN // tasks))
    plan = Plan(
        f"{series} {tasks}",
        tasks * side_by_side,
        host,
        slots,
        agent_s,
        _scale(tasks),
        mode=Mode.EPHEMERAL if series in (EPHEMERAL, LIMITED) else Mode.PERSISTENT,
        boots=series in (EPHEMERAL, LIMITED),
        cached=world.cached if series == PERSISTENT else 0.0,
        registry_links=world.registry_links if series == LIMITED else 0.0,
    )
    figure = LATENCY if series == PERSISTENT else SCALING
    return Job(figure, series, tasks, plan, utilisation=tasks == LATENCY_TASKS and series in (EPHEMERAL, CENTRAL))


def _beyond(world: World, agent_s: float) -> list[Job]:
    """At the paper's 2,000 tasks: several tasks per instance, placed by image, on spot instances."""
    packed = Plan(
        "packed",
        BEYOND_TASKS,
        world.small,
        world.packed_slots,
        agent_s,
        _scale(BEYOND_TASKS) * 1.5,
        mode=Mode.PERSISTENT,
    )
    hours = agent_s / 3600
    interrupted = world.spot_interruptions_per_hour * hours / world.packed_slots
    placed = replace(packed, cached=world.cached)
    found = {
        f"{packed.slots // 2} tasks an instance": replace(packed, slots=packed.slots // 2),
        f"{packed.slots} tasks an instance": packed,
        f"{packed.slots} tasks an instance, placed by image": placed,
        f"{packed.slots} tasks an instance, placed by image, spot": replace(
            placed, interrupted=interrupted, usd_factor=world.spot_price
        ),
    }
    return [Job(BEYOND, name, plan.tasks, plan) for name, plan in found.items()]


def _hurried(kept: list[Job]) -> list[Job]:
    small = [job for job in kept if job.tasks <= 100 and job.figure == SCALING]
    rest = [job for job in kept if job.figure != SCALING or job.utilisation]
    fewer = [
        replace(job, tasks=100, plan=replace(job.plan, tasks=100, scale=600.0, registry_links=0.0)) for job in rest
    ]
    return [*(job for job in small if job.tasks == 1), *fewer]
