"""The scheduling policy as pure functions.

The order: priority; then what had its turn and lost it; then weighted fair share between users; then first come first
served; within a run, groups that have started. `DispatchOrder.FIFO` leaves the fair share out, as in the paper.
Source: MegaFlow, section 2.3 (Task Scheduler).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from app.models.spec import Mode

Key = tuple[Mode, str]
"""A mode and a resource class."""


class DispatchOrder(StrEnum):
    """Who goes first among tasks of one priority."""

    FAIR = "fair"  # the user who holds least for their weight
    FIFO = "fifo"  # whoever came first


class Forecast(NamedTuple):
    """What a task of mode `auto` is expected to take and to cost in each mode, from its admission to its end."""

    seconds: Mapping[Mode, float]
    usd: Mapping[Mode, float]
    due_s: float | None = None  # until its deadline; None: it has none


class QueuedTask(NamedTuple):
    """One task at the head of a queue. `arrival` is its run, by which runs are sorted; `again`: it runs once more."""

    identity: Any
    priority: int
    arrival: Any
    again: bool = False
    model: str | None = None
    forecast: Forecast | None = None  # of mode `auto`; None: nothing is known of its like


@dataclass(frozen=True, slots=True)
class TaskQueue:
    """The first tasks of one user that asked for this mode and class, in the order in which they may go.

    `more`: others stand behind them. `avoids_pool`: of mode `auto`, while the pool of the class fails.
    """

    user_name: str
    mode: Mode
    resource_class: str
    waiting: Sequence[QueuedTask] = ()
    more: bool = False
    avoids_pool: bool = False

    @property
    def options(self) -> tuple[Mode, ...]:
        """The modes in which its tasks may run now."""
        if self.mode is not Mode.AUTO:
            return (self.mode,)
        return (Mode.EPHEMERAL,) if self.avoids_pool else (Mode.PERSISTENT, Mode.EPHEMERAL)

    @property
    def identity(self) -> tuple[Mode, str, str]:
        return self.mode, self.resource_class, self.user_name


@dataclass(slots=True)
class UserShare:
    """What one user holds, and how much more they may. None: not bounded."""

    weight: float = 1.0
    live: Counter[Key] = field(default_factory=Counter)
    running_quota: int | None = None
    instances_quota: int | None = None
    spent_up: bool = False

    def share(self, resource_class: str) -> float:
        """Slots held in this class for each unit of weight."""
        held = sum(count for (_, name), count in self.live.items() if name == resource_class)
        return held / self.weight

    def running_left(self) -> float:
        return math.inf if self.running_quota is None else self.running_quota - sum(self.live.values())

    def instances_left(self) -> float:
        held = sum(count for (mode, _), count in self.live.items() if mode is Mode.EPHEMERAL)
        return math.inf if self.instances_quota is None else self.instances_quota - held


@dataclass(frozen=True, slots=True)
class Decision:
    """Who goes now, in which mode; and, by queue, the limits that keep the rest waiting."""

    chosen: list[tuple[Any, Mode]]
    limiting: dict[tuple[Mode, str, str], tuple[str, ...]]


def free_slots(capacity: Mapping[Key, int], live: Mapping[Key, int]) -> Counter[Key]:
    """Free slots; never negative (capacity may have shrunk under what runs)."""
    return Counter({key: max(0, total - live.get(key, 0)) for key, total in capacity.items()})


def choose_mode(
    queue: TaskQueue,
    free: Mapping[Key, int],
    standing: UserShare,
    forecast: Forecast | None = None,
    pool_wait_s: float = math.inf,
    pool_usd: float = math.inf,
) -> Mode | None:
    """The mode to run in now, or None to wait.

    `auto` goes by what is expected of the task. When nothing is known, it takes a free slot of the standing pool, which
    costs nothing to start, and else an instance of its own. `pool_wait_s`: until a slot of the pool is free for it,
    which then costs `pool_usd`.
    """
    free_modes = [
        mode
        for mode in queue.options
        if free.get((mode, queue.resource_class), 0) > 0
        and (mode is not Mode.EPHEMERAL or standing.instances_left() > 0)
    ]
    if not free_modes or queue.mode is not Mode.AUTO or forecast is None:
        return free_modes[0] if free_modes else None
    return choose_by_cost(free_modes, forecast, pool_wait_s, pool_usd)


class PoolOutlook(NamedTuple):
    """What a task of mode `auto` may wait for: a slot of the pool that falls free, or an instance that it grows by."""

    slots: int  # of one instance
    release_s: float = math.inf  # between two ends in the pool
    boot_s: float = math.inf
    cooldown_s: float = 0.0  # an instance stays idle this long before it goes
    room: int = 0  # slots that the pool may still grow by, and those that boot now

    def wait_s(self, place: int) -> float:
        """For the task that is number `place` of those who wait, from 1 on."""
        return min(place * self.release_s, self.boot_s if place <= self.room else math.inf)

    def usd(self, forecast: Forecast, place: int, waiting: int) -> float:
        """Of a slot that is waited for: its share of a new instance is larger when fewer come with it.

        waiting: tasks that would share new instances, those on instances of their own among them: a measure of load.
        """
        usd, seconds = forecast.usd[Mode.PERSISTENT], forecast.seconds[Mode.PERSISTENT]
        if self.wait_s(place) >= place * self.release_s or seconds <= 0:
            return usd
        before = (place - 1) // self.slots * self.slots
        sharing = max(1, min(self.slots, waiting - before))
        return usd * self.slots / sharing * (seconds + self.boot_s + self.cooldown_s) / seconds


def choose_by_cost(free_modes: Sequence[Mode], forecast: Forecast, pool_wait_s: float, pool_usd: float) -> Mode | None:
    """The cheapest mode in which the task ends in time, or None: waiting for the pool is cheaper still.

    In time: before its deadline; without one, no later than if it began now. When nothing is, the soonest.
    """
    ends = {mode: forecast.seconds[mode] for mode in free_modes}
    usd = dict(forecast.usd)
    if Mode.PERSISTENT not in ends and math.isfinite(pool_wait_s):
        ends[Mode.PERSISTENT] = pool_wait_s + forecast.seconds[Mode.PERSISTENT]
        usd[Mode.PERSISTENT] = pool_usd
    soonest_s = min(ends[mode] for mode in free_modes)
    limit_s = soonest_s if forecast.due_s is None else forecast.due_s
    in_time = [mode for mode in ends if ends[mode] <= limit_s]
    best = min(in_time or free_modes, key=lambda mode: (usd[mode] if in_time else 0.0, ends[mode]))
    return best if best in free_modes else None


def obstacles(
    queue: TaskQueue, capacity: Mapping[Key, int], free: Mapping[Key, int], standing: UserShare
) -> tuple[str, ...]:
    """The limits that keep the whole queue waiting, by name; empty when its first task may go."""
    user = queue.user_name
    if standing.spent_up:
        return (f"quota:spend:{user}",)
    if standing.running_left() <= 0:
        return (f"quota:running:{user}",)
    if choose_mode(queue, free, standing) is not None:
        return ()
    avoided = queue.avoids_pool and queue.mode is Mode.AUTO
    failing = (f"pool-failing:persistent.{queue.resource_class}",) if avoided else ()
    return failing + tuple(_obstacle(mode, queue, capacity, standing) for mode in queue.options)


def _obstacle(mode: Mode, queue: TaskQueue, capacity: Mapping[Key, int], standing: UserShare) -> str:
    name = queue.resource_class
    if mode is Mode.EPHEMERAL:
        return f"quota:instances:{queue.user_name}" if standing.instances_left() <= 0 else f"slots:ephemeral.{name}"
    return f"slots:persistent.{name}" if capacity.get((mode, name), 0) > 0 else f"pool:persistent.{name}"


def admit(
    queues: Iterable[TaskQueue],
    capacity: Mapping[Key, int],
    free: Mapping[Key, int],
    standings: Mapping[str, UserShare],
    *,
    order: DispatchOrder = DispatchOrder.FAIR,
    most: int = 1_000_000,
    rooms: Mapping[Any, int] | None = None,
    pools: Mapping[str, PoolOutlook] | None = None,
) -> Decision:
    """Who goes now: up to `most`. A task that must wait does not hold up one of another queue that need not.

    rooms: of bounded runs and models, by their `QueuedTask.arrival` and `.model`: how many more may go. What is beyond
    that is passed over.
    pools: by class, what its tasks of mode `auto` may wait for.

    Changes the standings and nothing else: what is chosen is held.
    """
    queues = list(queues)
    left, room, waiters, crowd = Counter(free), dict(rooms or {}), Counter[str](), _crowds(queues, free, standings)
    chosen: list[tuple[Any, Mode]] = []
    limiting: dict[tuple[Mode, str, str], tuple[str, ...]] = {}
    heap = [entry for queue in queues if (entry := _entry(queue, 0, standings[queue.user_name], order))]
    heapq.heapify(heap)
    while heap and len(chosen) < most:
        rank, _, position, queue = heapq.heappop(heap)
        standing, head = standings[queue.user_name], queue.waiting[position]
        bounds = [key for key in (head.arrival, head.model) if key in room]
        hindered = obstacles(queue, capacity, left, standing)
        if hindered:
            limiting[queue.identity] = hindered
            continue
        if any(room[key] <= 0 for key in bounds):
            if entry := _entry(queue, position + 1, standing, order):
                heapq.heappush(heap, entry)
            continue
        now = _rank(queue, position, standing, order)
        if now > rank:  # another queue of this user went meanwhile
            heapq.heappush(heap, (now, queue.identity, position, queue))
            continue
        task, name = queue.waiting[position], queue.resource_class
        mode = choose_mode(queue, left, standing, task.forecast, *_pool(pools, queue, task.forecast, waiters, crowd))
        if mode is None:  # it waits for the pool by choice, and later tasks pass it
            waiters[name] += 1
            limiting[queue.identity] = (f"slots:persistent.{name}",)
            if entry := _entry(queue, position + 1, standing, order):
                heapq.heappush(heap, entry)
            continue
        left[mode, queue.resource_class] -= 1
        standing.live[mode, queue.resource_class] += 1
        for key in bounds:
            room[key] -= 1
        chosen.append((queue.waiting[position].identity, mode))
        if entry := _entry(queue, position + 1, standing, order):
            heapq.heappush(heap, entry)
        elif queue.more and (behind := obstacles(queue, capacity, left, standing)):
            limiting[queue.identity] = behind
    return Decision(chosen, limiting)


def _crowds(queues: Sequence[TaskQueue], free: Mapping[Key, int], standings: Mapping[str, UserShare]) -> Counter[str]:
    """By class, the tasks of mode `auto` for which the pool has no slot now, and those that run without it."""
    auto = Counter[str]()
    for queue in queues:
        if queue.mode is Mode.AUTO:
            auto[queue.resource_class] += len(queue.waiting)
    crowds = Counter({name: max(0, count - free.get((Mode.PERSISTENT, name), 0)) for name, count in auto.items()})
    for standing in standings.values():
        crowds.update({name: count for (mode, name), count in standing.live.items() if mode is Mode.EPHEMERAL})
    return crowds


def _pool(
    pools: Mapping[str, PoolOutlook] | None,
    queue: TaskQueue,
    forecast: Forecast | None,
    waiters: Mapping[str, int],
    crowd: Mapping[str, int],
) -> tuple[float, float]:
    """How long the next one would wait for a slot of the pool, and what that slot would cost."""
    name = queue.resource_class
    if forecast is None or not pools or name not in pools:
        return math.inf, math.inf
    if queue.avoids_pool:
        return math.inf, math.inf
    place = waiters[name] + 1
    return pools[name].wait_s(place), pools[name].usd(forecast, place, crowd[name])


_Rank = tuple[int, bool, float, Any]
_Entry = tuple[_Rank, tuple[Mode, str, str], int, TaskQueue]


def _entry(queue: TaskQueue, position: int, standing: UserShare, order: DispatchOrder) -> _Entry | None:
    if position >= len(queue.waiting):
        return None
    return _rank(queue, position, standing, order), queue.identity, position, queue


def _rank(queue: TaskQueue, position: int, standing: UserShare, order: DispatchOrder) -> _Rank:
    task = queue.waiting[position]
    share = standing.share(queue.resource_class) if order is DispatchOrder.FAIR else 0.0
    return -task.priority, not task.again, share, task.arrival


def missing_ephemeral(unclaimed: Mapping[Key, int], coming: Mapping[Key, int]) -> Counter[Key]:
    """Instances to request so that every dispatched attempt finds one.

    Level-triggered: an instance that fails to boot leaves a gap, and the next look fills it.
    """
    gaps = {key: count - coming.get(key, 0) for key, count in unclaimed.items() if key[0] is Mode.EPHEMERAL}
    return Counter({key: gap for key, gap in gaps.items() if gap > 0})


def servable(waiting: Iterable[tuple[str, int]], standings: Mapping[str, UserShare]) -> int:
    """How many of each user's waiting tasks free slots could take: quotas keep the rest waiting."""
    counts: Counter[str] = Counter()
    for user_name, count in waiting:
        counts[user_name] += count
    bounded = [
        min(count, max(0.0, standings[user].running_left()))
        for user, count in counts.items()
        if not standings[user].spent_up
    ]
    return int(sum(bounded))


def pool_target(*, held: int, waiting: int, slots: int, at_least: int, at_most: int) -> int:
    """Standing instances that would serve what runs (`held`) and what waits, within the pool's bounds.

    Growing is for now; shrinking is the caller's to delay by the cooldown.
    """
    return min(at_most, max(at_least, -(-(held + waiting) // max(1, slots))))


# --- Pressure: how much may run beside what runs ----------------------------------------------------------------------

MEMORY_LEAST = 0.1
"""Share of a host's memory that must be available for one attempt more."""
KV_MOST = 0.9
WAITING_MOST = 0.1
"""Share of an engine's calls that may wait: runs become longer by as much."""
_CALM = 0.8
_SHRINK = 0.75
_STEP = 2


def host_pressure(cpu: float, memory_available: float, cpu_most: float) -> float:
    """How full a host is; 1: as full as it may be. Shares, as `app.ledger.pressure.HostPressure` has them."""
    return max(cpu / cpu_most, MEMORY_LEAST / max(memory_available, 1e-6))


def engine_pressure(*, inside: int, waiting: int, queued: int, refused: int, kv_use: float | None) -> float:
    """How full an engine is; 1: as full as it may be. Counts of calls, as `app.ledger.pressure.EngineLoad` has them."""
    share = (waiting + queued) / max(1, inside + waiting)
    return max(share / WAITING_MOST, (kv_use or 0.0) / KV_MOST, 1.0 if refused else 0.0)


def next_window(window: float, live: int, pressure: float, least: int = 1) -> float:
    """How many attempts a host or a model may have at once, after one more report of its pressure.

    As TCP's: a window that is used grows by an eighth, at least by 2, while there is no pressure; under pressure it is
    three quarters of what runs. `least`: it never falls below that.
    """
    if pressure >= 1:
        return max(least, min(window, live * _SHRINK))
    if pressure < _CALM and live + 1 >= window:
        return max(least, window + max(_STEP, window / 8))
    return max(least, window)


def first_window(cores: int) -> int:
    """Attempts that a host may have before its pressure with them is known, and whatever its processors do."""
    return max(4, 2 * cores)
