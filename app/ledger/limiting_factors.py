"""Finds which limits keep a queue waiting now, by the dispatcher's rules.

A queue is a user's tasks of one mode (as requested) and class. Limits are named `slots:ephemeral.standard`,
`pool:persistent.gpu`, `class:gpu`, `quota:running:alice`, `quota:instances:alice`, `quota:spend:alice`,
`quota:run:ID`, `quota:run:ID:policy`, `host-pressure:persistent.gpu`, `pool-failing:persistent.gpu`,
`model-full:NAME`; a pause is listed as `pause:run:ID`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from app.ledger import classes, pauses, pressure, quotas, waiting
from app.ledger.classes import ResourceClass
from app.ledger.database import sql
from app.ledger.pressure import EngineLoad, HostLoad
from app.ledger.quotas import Quotas
from app.ledger.waiting import BoundedRun, QueueKey, QueueLimit
from app.models.instance import queue_of
from app.models.spec import Mode
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class LimitingFactor:
    """A limit that keeps a queue waiting. `help`: a command that would raise it, or what to wait for."""

    limit: str
    used: float | None
    capacity: float | None
    help: str
    why: str = ""
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class PoolState:
    """Counts of a pool's instances, by state."""

    slots: int = 0  # of those that are ready
    ready: int = 0
    coming: int = 0  # requested or booting
    draining: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """State by which the dispatcher decides, read in one transaction."""

    classes: Mapping[str, ResourceClass]
    pools: Mapping[str, PoolState]
    live: Counter[tuple[Mode, str]]  # attempts dispatched or running, by mode and class
    users: Counter[str]  # the same, by user
    ephemeral: Counter[str]  # live ephemeral attempts, by user: each has its own instance
    book: Quotas
    paused: Mapping[UUID, tuple[datetime, str]]  # run: since when, why
    since: Mapping[QueueLimit, datetime]  # limits on record
    bounded: Mapping[UUID, BoundedRun]  # runs with a bound on their attempts at once, by id
    hosts: Sequence[HostLoad]  # that report their pressure
    engines: Sequence[EngineLoad]  # that have calls

    def factors(
        self, queue: QueueKey, run_id: UUID | None = None, waiting: int = 1, models: Collection[str | None] = ()
    ) -> list[LimitingFactor]:
        """Returns the limits that keep a queue waiting, the widest first; none: its turn may come with the next pass.

        waiting: number of its waiting tasks, for the advice on a new limit. models: those that its tasks name.
        """
        bounds = self._pause(run_id) or self._class(queue) or self._user(queue) or self._run(run_id)
        bounds = bounds or self._model(queue, models) or self._places(queue, waiting)
        return [replace(bound, since=bound.since or self.since.get(QueueLimit(bound.limit, queue))) for bound in bounds]

    def _pause(self, run_id: UUID | None) -> list[LimitingFactor]:
        if run_id is None or run_id not in self.paused:
            return []
        since, why = self.paused[run_id]
        advice = f"megaflow resume {run_id}"
        return [LimitingFactor(pauses.limit_name(run_id), None, None, advice, why=why, since=since)]

    def _class(self, queue: QueueKey) -> list[LimitingFactor]:
        resource_class, name = self.classes.get(queue.resource_class), queue.resource_class
        option = "--pool-max 1" if queue.mode is Mode.PERSISTENT else "--ephemeral 1"
        advice = f"megaflow classes set {name} {option}"
        if resource_class is None:
            return [LimitingFactor(f"class:{name}", None, None, advice, why="the class is not defined")]
        if not resource_class.could_run(queue.mode) and not (queue.mode is not Mode.EPHEMERAL and name in self.pools):
            return [
                LimitingFactor(f"class:{name}", None, 0, advice, why=f"the class has no capacity for mode {queue.mode}")
            ]
        return []

    def _user(self, queue: QueueKey) -> list[LimitingFactor]:
        user, quota = queue.user_name, self.book.of(queue.user_name)
        factors = []
        live, spent = self.users[user], self.book.spent(user)
        if quota.running is not None and live >= quota.running:
            advice = f"megaflow quota set {user} --running {_more(quota.running)}"
            factors.append(LimitingFactor(f"quota:running:{user}", live, quota.running, advice))
        if quota.spend_usd is not None and spent >= quota.spend_usd:
            advice = f"megaflow quota set {user} --spend {_more(math.ceil(max(spent, quota.spend_usd)))}"
            factors.append(LimitingFactor(f"quota:spend:{user}", spent, quota.spend_usd, advice))
        return factors

    def _run(self, run_id: UUID | None) -> list[LimitingFactor]:
        run = self.bounded.get(run_id) if run_id else None
        if run is None or run.room:
            return []
        if run.policy is not None and not run.policy.room:
            held, advice = run.policy.held, "wait: the next groups begin when the trainer commits a batch"
            why = f"{held} task(s) wait for a new policy: their samples would be older than `max_staleness` allows"
            return [LimitingFactor(run.limit, run.policy.begun, run.policy.most, advice, why=why)]
        advice = "wait: the next one begins when one of the run's attempts ends"
        return [
            LimitingFactor(run.limit, run.live, run.max_running, advice, why="the run was submitted with --concurrency")
        ]

    def _model(self, queue: QueueKey, models: Collection[str | None]) -> list[LimitingFactor]:
        """Returns one factor per model when all of these models are full, else none."""
        limits = {model: pressure.model_limit(model) for model in models if model is not None}
        if (
            not limits
            or len(limits) < len(models)
            or any(QueueLimit(o, queue) not in self.since for o in limits.values())
        ):
            return []
        factors = []
        for model, limit in limits.items():
            loads = "; ".join(one.text for one in self.engines if model in one.models)
            why = f"model full: {loads or 'its engines had too many calls'}"
            factors.append(LimitingFactor(limit, None, None, "wait, or `megaflow models add` another engine", why=why))
        return factors

    def _places(self, queue: QueueKey, waiting: int) -> list[LimitingFactor]:
        """Returns the factors of slots; a queue of mode `auto` waits only while both modes have none free."""
        options = (Mode.PERSISTENT, Mode.EPHEMERAL) if queue.mode is Mode.AUTO else (queue.mode,)
        factors: list[LimitingFactor] = []
        for mode in options:
            bound = self._ephemeral(queue, waiting) if mode is Mode.EPHEMERAL else self._persistent(queue)
            if bound is None:
                return []
            if not (queue.mode is Mode.AUTO and bound.capacity == 0):  # mode not offered: the other one is the limit
                factors.append(bound)
        return factors

    def _ephemeral(self, queue: QueueKey, waiting: int) -> LimitingFactor | None:
        quota, user, name = self.book.of(queue.user_name), queue.user_name, queue.resource_class
        held, live = self.ephemeral[user], self.live[Mode.EPHEMERAL, name]
        capacity = self.classes[name].ephemeral_capacity
        if capacity and quota.instances is not None and held >= quota.instances:
            advice = f"megaflow quota set {user} --instances {_more(quota.instances)}"
            return LimitingFactor(f"quota:instances:{user}", held, quota.instances, advice)
        if live >= capacity:
            advice = f"megaflow classes set {name} --ephemeral {capacity + max(1, min(waiting, capacity))}"
            return LimitingFactor(f"slots:{queue_of(Mode.EPHEMERAL, name)}", live, capacity, advice)
        return None

    def _persistent(self, queue: QueueKey) -> LimitingFactor | None:
        name = queue.resource_class
        resource_class, pool = self.classes[name], self.pools.get(name, PoolState())
        key, live = queue_of(Mode.PERSISTENT, name), self.live[Mode.PERSISTENT, name]
        if QueueLimit(limit := pressure.failing_limit(name), queue) in self.since:
            why = "most attempts that ended in the pool lately failed for reasons of the infrastructure"
            advice = "wait: the pool is tried again soon; `megaflow diagnose RUN` groups what failed"
            return LimitingFactor(limit, live, pool.slots, advice, why=why)
        if pool.slots == 0:
            why = f"no standing instance is ready; {pool.coming} on the way, {pool.draining} draining"
            offered = max(resource_class.pool_max, pool.coming + pool.draining)
            advice = (
                "wait: they are booting" if pool.coming else "wait, or see `megaflow instances` and `megaflow doctor`"
            )
            return LimitingFactor(f"pool:{key}", 0, offered, advice, why=why)
        if live >= pool.slots:
            if pool.coming or pool.ready < resource_class.pool_max:
                advice = f"wait: the pool may grow to {resource_class.pool_max}; {pool.coming} on the way"
            else:
                advice = f"megaflow classes set {name} --pool-max {_more(max(pool.ready, resource_class.pool_max))}"
            return LimitingFactor(f"slots:{key}", live, pool.slots, advice)
        if QueueLimit(limit := pressure.host_limit(name), queue) in self.since:
            why = "host pressure: " + "; ".join(one.text for one in self.hosts if one.resource_class == name)
            advice = "wait: attempts begin again when it falls; more hosts help, or MEGAFLOW_HOST_CPU_MOST"
            return LimitingFactor(limit, live, pool.slots, advice, why=why)
        return None


def _more(limit: int) -> int:
    """Returns a limit worth trying instead: twice as much."""
    return max(1, limit * 2)


def state(connection: Connection, settings: Settings) -> SchedulerState:
    """Reads the state that the dispatcher uses."""
    seen = waiting.occupancy(connection)
    users: Counter[str] = Counter()
    ephemeral: Counter[str] = Counter()
    for (user, (mode, _)), count in seen.by_user.items():
        users[user] += count
        ephemeral[user] += count * (mode is Mode.EPHEMERAL)
    pauses_now = sql(connection, "SELECT name, since, reason FROM pauses WHERE kind = 'run'")
    return SchedulerState(
        classes=classes.load(connection, settings),
        pools=_pools(connection),
        live=seen.live,
        users=users,
        ephemeral=ephemeral,
        book=quotas.load(connection),
        paused={UUID(row.name): (row.since, row.reason) for row in pauses_now},
        since=waiting.open_limits(connection),
        bounded={run.run_id: run for run in waiting.bounded_runs(connection)},
        hosts=pressure.hosts(connection),
        engines=pressure.engines(connection),
    )


def _pools(connection: Connection) -> dict[str, PoolState]:
    rows = sql(
        connection,
        "SELECT resource_class, coalesce(sum(slots) FILTER (WHERE state = 'ready'), 0)::int AS slots,"
        " count(*) FILTER (WHERE state = 'ready') AS ready,"
        " count(*) FILTER (WHERE state IN ('requested', 'booting')) AS coming,"
        " count(*) FILTER (WHERE state = 'draining') AS draining"
        " FROM instances WHERE mode = 'persistent' AND state NOT IN ('terminated', 'failed') GROUP BY 1",
    )
    return {row.resource_class: PoolState(row.slots, row.ready, row.coming, row.draining) for row in rows}
