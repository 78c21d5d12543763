"""One point of a figure: so many tasks, on such hosts, through the real control plane, in scaled time.

What instances do is divided by `scale`: boots, downloads, agents, gradings. What the control plane does is not: its
seconds are counted as they are, and only what the simulation drew is multiplied again. A task's latency is therefore

    submission + scheduling + all that the ledger has beyond what was drawn (real seconds) + scale * drawn

which is right as long as no task waits for another one's end: every point has a slot for each of its tasks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import LiteralString
from uuid import UUID

from app.ledger import accept, classes
from app.ledger.accept import NewRun
from app.models.outcome import Phase
from app.models.simulation import Simulation
from app.models.spec import Mode
from bench.control_system import System, a_spec, running
from bench.paper.data import HostKind, World

_PATIENCE = 12.0
"""A point may take this many times its agents' mean time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one point is. Times are the paper's, in seconds."""

    name: str
    tasks: int
    host: HostKind
    slots: int  # of one instance
    agent_s: float  # mean
    scale: float
    mode: Mode = Mode.EPHEMERAL
    boots: bool = True  # instances are launched for this job; else they stand before it
    cached: float = 0.0
    registry_links: float = 0.0
    interrupted: float = 0.0  # chance of an attempt
    usd_factor: float = 1.0

    @property
    def instances(self) -> int:
        return -(-self.tasks // self.slots)


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt, in the paper's seconds. `instance`: a number of this point; phases count from the claim."""

    task: int
    instance: int
    submission_s: float
    scheduling_s: float
    boot_s: float
    image_s: float
    environment_s: float
    agent_s: float
    rest_s: float
    claimed_s: float  # since the first was accepted, simulated seconds and the control plane's alike
    ended: bool  # it is its task's last

    @property
    def startup_s(self) -> float:
        """Until the environment is ready: boot, image, start."""
        return self.boot_s + self.image_s + self.environment_s

    @property
    def held_s(self) -> float:
        """What its slot was held for, from the claim."""
        return self.image_s + self.environment_s + self.agent_s + self.rest_s

    @property
    def total_s(self) -> float:
        return self.submission_s + self.scheduling_s + self.boot_s + self.held_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """A point as it was run. `wall_s`: real seconds; `lost`: tasks that did not succeed."""

    plan: Plan
    records: list[Record]
    wall_s: float
    lost: int

    @property
    def totals_s(self) -> list[float]:
        """Of each task, all of its attempts together."""
        found: defaultdict[int, float] = defaultdict(float)
        for one in self.records:
            found[one.task] += one.total_s
        return list(found.values())

    @property
    def instance_s(self) -> list[float]:
        """What each instance is paid for: its boot, and from its first claim to the end of its last attempt."""
        return [
            max(one.boot_s for one in held)
            + max(one.claimed_s + one.held_s for one in held)
            - min(one.claimed_s for one in held)
            for held in self.by_instance()
        ]

    def by_instance(self) -> list[list[Record]]:
        """The attempts of each instance, as they were claimed."""
        found: defaultdict[int, list[Record]] = defaultdict(list)
        for one in sorted(self.records, key=lambda one: one.claimed_s):
            found[one.instance].append(one)
        return list(found.values())


def simulated(plan: Plan, world: World) -> Simulation:
    """How the plan's instances behave, in scaled seconds."""

    def scaled(seconds: float) -> str:
        return f"constant:{seconds / plan.scale:.6g}"

    return Simulation.of(
        boot_s=scaled(world.boot_s if plan.boots else 0.0),
        pull_s=scaled(world.pull_s(plan.host)),
        unpack_s=scaled(world.unpack_s),
        start_s=scaled(world.start_s),
        run_s=f"lognormal:{world.median_s(plan.agent_s) / plan.scale:.6g},{world.spread:g}",
        grade_s=scaled(world.grade_s),
        cached=plan.cached,
        registry_links=plan.registry_links,
        together=0 if plan.cached or plan.interrupted else plan.tasks,
        interrupted=plan.interrupted,
    )


@contextmanager
def stack() -> Iterator[System]:
    """The control plane that all points are run on. Raises: MegaFlowError: it cannot be had here."""
    settings = {"pool_cooldown_s": 3600.0, "boot_timeout_s": 300.0, "ephemeral_idle_s": 300.0, "dispatch_batch": 1000}
    with running("constant:1", persistent_instances=0, ephemeral_capacity=0, **settings) as system:
        yield system


def run(system: System, plan: Plan, world: World, number: int) -> Outcome:
    """Run the plan's tasks in a resource class of their own, and read what became of them. `number`: of the point.

    Raises: MegaFlowError, RuntimeError: the stack did not do its work.
    """
    name = f"point-{number}"
    system.stack.provider().behave(simulated(plan, world).model_copy(update={"seed": number}))
    pooled = 0 if plan.mode is Mode.EPHEMERAL else plan.instances
    classes.set_class(
        system.database,
        name,
        ephemeral_capacity=0 if pooled else plan.tasks,
        pool_min=0 if plan.boots else pooled,
        pool_max=pooled,
        pool_slots=plan.slots,
    )
    if pooled and not plan.boots:
        system.until("the pool", lambda: _ready(system, name) >= pooled, 120)
    spec = a_spec(mode=plan.mode).model_copy(update={"resource_class": name})
    begun = time.monotonic()
    accepted = accept.accept(system.database, NewRun(specs=[spec] * plan.tasks))
    submission_s = time.monotonic() - begun
    system.until_ended(accepted, timeout_s=60 + _PATIENCE * (plan.agent_s + 1000) / plan.scale)
    wall_s = time.monotonic() - begun
    records = list(_records(system, accepted.run_id, plan, world, submission_s))
    lost = plan.tasks - system.count("succeeded", accepted.run_id)
    classes.set_class(system.database, name, ephemeral_capacity=0, pool_min=0, pool_max=0, pool_cooldown_s=0.0)
    return Outcome(plan, records, wall_s, lost)


def _ready(system: System, name: str) -> int:
    query: LiteralString = "SELECT count(*) FROM instances WHERE resource_class = %s AND state = 'ready'"
    return system.number(query, [name])


_ATTEMPTS = """
SELECT t.id, t.accepted_at, a.claimed_at, a.finished_at, a.phases, a.instance_id,
    lag(a.finished_at) OVER (PARTITION BY t.id ORDER BY a.number) AS before,
    a.number = t.attempts AS is_last, a.environment->'simulated_s' AS drawn
FROM attempts a JOIN tasks t ON t.id = a.task_id
WHERE t.run_id = %s AND a.claimed_at IS NOT NULL AND a.finished_at IS NOT NULL ORDER BY t.id, a.number
"""
_STAGES = (Phase.IMAGE_READY, Phase.ENVIRONMENT_READY, Phase.AGENT_ENDED)


def _records(system: System, run_id: UUID, plan: Plan, world: World, submission_s: float) -> Iterator[Record]:
    tasks: dict[UUID, int] = {}
    instances: dict[UUID, int] = {}
    for row in system.connection.execute(_ATTEMPTS, [run_id]).fetchall():
        task_id, accepted, claimed, finished, phases, instance_id, before, is_last, drawn = row
        first = before is None
        waited_s = (claimed - (accepted if first else before)).total_seconds()
        booted = plan.boots and (first or waited_s >= world.boot_s / plan.scale)
        held_s = (finished - claimed).total_seconds()
        at = _drawn(drawn) if drawn else _reached(phases, claimed, held_s)
        image_s, environment_s, agent_s, rest_s = (plan.scale * (until - since) for since, until in pairwise(at))
        yield Record(
            tasks.setdefault(task_id, len(tasks)),
            instances.setdefault(instance_id, len(instances)),
            submission_s if first else 0.0,
            max(0.0, waited_s - (world.boot_s / plan.scale if booted else 0.0)),
            world.boot_s if booted else 0.0,
            image_s,
            environment_s,
            agent_s,
            rest_s + max(0.0, held_s - at[-1]),  # what the control plane took for it, in real seconds
            plan.scale * (claimed - accepted).total_seconds() if plan.interrupted else 0.0,
            bool(is_last),
        )


def _drawn(told: dict[str, float]) -> list[float]:
    """Seconds from the claim to image, environment, the agent's end and the end, as the simulation drew them."""
    return [0.0, *(told[phase] for phase in _STAGES), told["end"]]


def _reached(phases: dict[str, str], claimed: datetime, held_s: float) -> list[float]:
    """The same of an attempt that did not come to its end, by the ledger's times; what it did not reach is its end."""
    found = [0.0]
    for phase in _STAGES:
        after_s = (datetime.fromisoformat(phases[phase]) - claimed).total_seconds() if phase in phases else held_s
        found.append(min(held_s, max(found[-1], after_s)))
    return [*found, held_s]
