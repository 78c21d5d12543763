"""Simulates a workload in virtual time: the dispatcher's policy with known durations, without servers.

A year of tasks takes seconds: nothing sleeps, and the policy of `app.scheduling.policy` is called at every event, as
by the dispatcher. The time of the control plane itself (milliseconds per task) is left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.models.spec import Mode
from app.scheduling import policy
from app.scheduling.policy import DispatchOrder, Forecast, PoolOutlook, QueuedTask, TaskQueue, UserShare

_CLASS = "standard"
_LOOK_S = 1.0
"""Longest interval between two looks of the dispatcher."""
_MODES = (Mode.EPHEMERAL, Mode.PERSISTENT)


@dataclass(frozen=True, slots=True)
class VirtualTask:
    """A task. `held_s`: seconds that it holds a slot in each mode, from the claim on, all its attempts together."""

    arrival_s: float
    held_s: Mapping[Mode, float]
    mode: Mode = Mode.AUTO
    user: str = "default"
    run: int = 0
    priority: int = 0
    due_s: float | None = None  # after its arrival
    expected_s: Mapping[Mode, float] | None = None  # forecast of `held_s` for the policy; None: no forecast


@dataclass(frozen=True, slots=True)
class VirtualFleet:
    """Capacity of a virtual fleet. `boot_s`: of every instance except those standing at the first arrival."""

    ephemeral: int = 0  # instances at once
    pool: int = 0  # maximum of standing instances
    pool_min: int | None = None  # minimum of standing instances; None: always `pool`
    cooldown_s: float = 60.0  # idle time after which instances are removed
    slots: int = 4  # of a standing instance
    boot_s: float = 0.0
    claim_s: float = 0.0  # from admission to claim by a standing instance
    order: DispatchOrder = DispatchOrder.FAIR
    usd_per_hour: Mapping[Mode, float] = field(default_factory=lambda: dict.fromkeys(_MODES, 1.0))  # of an instance


@dataclass(frozen=True, slots=True)
class VirtualEnd:
    """Result of a task, in seconds since the first arrival."""

    task: VirtualTask
    mode: Mode
    admitted_s: float
    ended_s: float

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.task.arrival_s


@dataclass(frozen=True, slots=True)
class VirtualOutcome:
    """All ends, and the instances' cost: ephemeral ones for boot and task, the pool for the whole time."""

    ends: Sequence[VirtualEnd]
    makespan_s: float
    cost_usd: float

    def latency_s(self, share: float) -> float:
        """Returns the latency that this share of the tasks does not exceed. Raises: ValueError: no tasks."""
        if not self.ends:
            raise ValueError("expected at least one task")
        ordered = sorted(end.latency_s for end in self.ends)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def run(tasks: Sequence[VirtualTask], fleet: VirtualFleet) -> VirtualOutcome:
    """Runs every task. Raises: ValueError: a task can never run on this fleet."""
    room = {Mode.EPHEMERAL: fleet.ephemeral, Mode.PERSISTENT: fleet.pool * fleet.slots}
    room[Mode.AUTO] = sum(room.values())
    if without := sum(not room[task.mode] for task in tasks):
        raise ValueError(f"expected capacity for every task, found {without} without")
    return _Virtual(tasks, fleet).run()


@dataclass(slots=True, eq=False)
class _Standing:
    """An instance of the pool."""

    launched_s: float
    ready: bool = False
    held: int = 0
    draining: bool = False
    ended_s: float | None = None


class _Virtual:
    def __init__(self, tasks: Sequence[VirtualTask], fleet: VirtualFleet) -> None:
        self._fleet = fleet
        self._tasks = tasks
        self._waiting: defaultdict[tuple[str, Mode], deque[int]] = defaultdict(deque)
        self._live: Counter[policy.Key] = Counter()
        self._by_user: Counter[tuple[str, Mode]] = Counter()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, str, Any]] = []
        self._ends: list[VirtualEnd] = []
        self._looks_at = 0.0
        self._mean_s = _mean_s(tasks)
        self._least = fleet.pool if fleet.pool_min is None else fleet.pool_min
        self._pool = [_Standing(0.0, ready=True) for _ in range(self._least)]
        self._gone: list[_Standing] = []
        self._surplus: tuple[float, int] | None = None  # start, minimum surplus since then

    def run(self) -> VirtualOutcome:
        for place, task in enumerate(self._tasks):
            self._at(task.arrival_s, "arrives", place)
        now = 0.0
        while self._due and len(self._ends) < len(self._tasks):
            now = self._due[0][0]
            while self._due and self._due[0][0] <= now:
                self._happens(now, *heapq.heappop(self._due)[2:])
            self._decide(now)
        return self._outcome(now)

    def _at(self, when: float, what: str, value: Any) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), what, value))

    def _happens(self, now: float, what: str, value: Any) -> None:
        match what:
            case "arrives":
                task = self._tasks[value]
                self._waiting[task.user, task.mode].append(value)
            case "ends":
                end, instance = value
                self._live[end.mode, _CLASS] -= 1
                self._by_user[end.task.user, end.mode] -= 1
                self._ends.append(end)
                if instance is not None:
                    instance.held -= 1
                    self._leave_if_done(instance, now)
            case "ready":
                value.ready = True

    def _decide(self, now: float) -> None:
        slots = self._fleet.slots
        standing = sum(slots for one in self._pool if one.ready and not one.draining)
        held = self._live[Mode.PERSISTENT, _CLASS] - sum(one.held for one in self._pool if one.draining)
        capacity = {(Mode.EPHEMERAL, _CLASS): self._fleet.ephemeral, (Mode.PERSISTENT, _CLASS): standing}
        free = policy.free_slots(capacity, {**self._live, (Mode.PERSISTENT, _CLASS): held})
        heads = {key: list(itertools.islice(line, free.total() + 1)) for key, line in self._waiting.items() if line}
        if heads and free.total():
            queues = [self._queue(user, mode, places, now) for (user, mode), places in heads.items()]
            standings = {user: self._share(user) for user, _ in heads}
            pools = {_CLASS: self._outlook(standing)}
            decision = policy.admit(queues, capacity, free, standings, order=self._fleet.order, pools=pools)
            for place, mode in decision.chosen:
                self._start(place, mode, now)
        self._resize(now)
        if any(self._waiting.values()) and now >= self._looks_at:
            self._looks_at = now + _LOOK_S
            self._at(self._looks_at, "looks", None)  # a task that waits by choice may now run

    def _outlook(self, standing: int) -> PoolOutlook:
        fleet = self._fleet
        room = (fleet.pool - sum(one.ready for one in self._pool)) * fleet.slots
        release_s = self._mean_s / standing if standing else math.inf
        return PoolOutlook(fleet.slots, release_s, fleet.boot_s, fleet.cooldown_s, room)

    def _queue(self, user: str, mode: Mode, places: Sequence[int], now: float) -> TaskQueue:
        waiting = [
            QueuedTask(place, one.priority, (one.run, place), forecast=self._forecast(one, now))
            for place in places
            for one in (self._tasks[place],)
        ]
        return TaskQueue(user, mode, _CLASS, waiting)

    def _forecast(self, task: VirtualTask, now: float) -> Forecast | None:
        if task.expected_s is None or task.mode is not Mode.AUTO:
            return None
        due_s = None if task.due_s is None else task.arrival_s + task.due_s - now
        return forecast(task.expected_s, self._fleet, due_s)

    def _share(self, user: str) -> UserShare:
        return UserShare(live=Counter({(mode, _CLASS): self._by_user[user, mode] for mode in _MODES}))

    def _start(self, place: int, mode: Mode, now: float) -> None:
        task = self._tasks[place]
        self._waiting[task.user, task.mode].remove(place)
        self._live[mode, _CLASS] += 1
        self._by_user[task.user, mode] += 1
        instance = None
        if mode is Mode.PERSISTENT:  # choose the instance with the most free slots
            open_ = [one for one in self._pool if one.ready and not one.draining]
            instance = min(open_, key=lambda one: one.held)
            instance.held += 1
        before_s = self._fleet.boot_s if mode is Mode.EPHEMERAL else self._fleet.claim_s
        ended_s = now + before_s + task.held_s[mode]
        self._at(ended_s, "ends", (VirtualEnd(task, mode, now, ended_s), instance))

    def _resize(self, now: float) -> None:
        """Resizes the pool like the dispatcher: by waiting and running tasks; drains a surplus after the cooldown."""
        fleet = self._fleet
        if fleet.pool_min is None or not fleet.pool:
            return
        there = [one for one in self._pool if not one.draining]
        waiting = sum(len(line) for (_, mode), line in self._waiting.items() if mode is not Mode.EPHEMERAL)
        held = sum(one.held for one in there)
        bounds = {"slots": fleet.slots, "at_least": self._least, "at_most": fleet.pool}
        growth = policy.pool_target(held=held, waiting=waiting, **bounds) - len(there)
        for _ in range(growth):
            instance = _Standing(now)
            self._pool.append(instance)
            self._at(now + fleet.boot_s, "ready", instance)
        if growth >= 0:
            self._surplus = None
            return
        since, least = self._surplus or (now, -growth)
        self._surplus = since, min(least, -growth)
        if self._surplus[0] == now:
            self._at(now + fleet.cooldown_s, "looks", None)
        elif now - since >= fleet.cooldown_s:
            for instance in sorted((one for one in there if one.ready), key=lambda one: one.held)[: self._surplus[1]]:
                instance.draining = True
                self._leave_if_done(instance, now)
            self._surplus = None

    def _leave_if_done(self, instance: _Standing, now: float) -> None:
        if instance.draining and not instance.held:
            instance.ended_s = now
            self._pool.remove(instance)
            self._gone.append(instance)

    def _outcome(self, now: float) -> VirtualOutcome:
        fleet = self._fleet
        first_s = min((task.arrival_s for task in self._tasks), default=0.0)
        ephemeral_s = sum(end.ended_s - end.admitted_s for end in self._ends if end.mode is Mode.EPHEMERAL)
        pool_s = sum((one.ended_s or now) - max(first_s, one.launched_s) for one in (*self._gone, *self._pool))
        usd = pool_s * fleet.usd_per_hour[Mode.PERSISTENT] + ephemeral_s * fleet.usd_per_hour[Mode.EPHEMERAL]
        return VirtualOutcome(self._ends, now - first_s, usd / 3600)


def forecast(expected_s: Mapping[Mode, float], fleet: VirtualFleet, due_s: float | None) -> Forecast:
    """Returns a task's forecast for the policy: a pool slot costs its share of an instance and needs no boot."""
    seconds = {
        Mode.EPHEMERAL: fleet.boot_s + expected_s[Mode.EPHEMERAL],
        Mode.PERSISTENT: fleet.claim_s + expected_s[Mode.PERSISTENT],
    }
    usd = {
        Mode.EPHEMERAL: seconds[Mode.EPHEMERAL] * fleet.usd_per_hour[Mode.EPHEMERAL] / 3600,
        Mode.PERSISTENT: seconds[Mode.PERSISTENT] * fleet.usd_per_hour[Mode.PERSISTENT] / 3600 / fleet.slots,
    }
    return Forecast(seconds, usd, due_s)


def _mean_s(tasks: Sequence[VirtualTask]) -> float:
    """Returns the mean seconds that the tasks are expected to hold a pool slot."""
    durations = [(task.expected_s or task.held_s)[Mode.PERSISTENT] for task in tasks]
    return sum(durations) / len(durations) if durations else math.inf
