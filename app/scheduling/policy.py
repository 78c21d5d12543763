"""Implements the scheduling policy as pure functions.

The order: priority; then retried tasks, which already had their turn; then weighted fair share between users; then
arrival; within a run, groups that have started. `DispatchOrder.FIFO` omits the fair share, as in the paper.
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
    """Order of tasks with the same priority."""

    FAIR = "fair"  # the user with the fewest slots per weight first
    FIFO = "fifo"  # by arrival


class Forecast(NamedTuple):
    """Expected time and cost of a task of mode `auto` in each mode, from admission to end."""

    seconds: Mapping[Mode, float]
    usd: Mapping[Mode, float]
    due_s: float | None = None  # seconds until its deadline; None: no deadline


class QueuedTask(NamedTuple):
    """A task at the head of a queue. `arrival` is its run, by which tasks are sorted; `again`: it has run before."""

    identity: Any
    priority: int
    arrival: Any
    again: bool = False
    model: str | None = None
    forecast: Forecast | None = None  # of mode `auto`; None: nothing is known about similar tasks


@dataclass(frozen=True, slots=True)
class TaskQueue:
    """First tasks of one user with this requested mode and class, in order.

    `more`: there are tasks behind them. `avoids_pool`: mode `auto` while the pool of the class fails.
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
    """Slots and quotas of one user. None: no limit."""

    weight: float = 1.0
    live: Counter[Key] = field(default_factory=Counter)
    running_quota: int | None = None
    instances_quota: int | None = None
    spent_up: bool = False

    def share(self, resource_class: str) -> float:
        """Returns the slots held in this class per unit of weight."""
        held = sum(count for (_, name), count in self.live.items() if name == resource_class)
        return held / self.weight

    def running_left(self) -> float:
        return math.inf if self.running_quota is None else self.running_quota - sum(self.live.values())

    def instances_left(self) -> float:
        held = sum(count for (mode, _), count in self.live.items() if mode is Mode.EPHEMERAL)
        return math.inf if self.instances_quota is None else self.instances_quota - held


@dataclass(frozen=True, slots=True)
class Decision:
    """Tasks admitted now, with their mode; and, by queue, the limiting factors of the waiting tasks."""

    chosen: list[tuple[Any, Mode]]
    limiting: dict[tuple[Mode, str, str], tuple[str, ...]]


def free_slots(capacity: Mapping[Key, int], live: Mapping[Key, int]) -> Counter[Key]:
    """Returns the free slots; never negative (capacity may have shrunk below the running attempts)."""
    return Counter({key: max(0, total - live.get(key, 0)) for key, total in capacity.items()})


def choose_mode(
    queue: TaskQueue,
    free: Mapping[Key, int],
    standing: UserShare,
    forecast: Forecast | None = None,
    pool_wait_s: float = math.inf,
    pool_usd: float = math.inf,
) -> Mode | None:
    """Returns the mode to run in now; None: wait.

    `auto` uses the task's forecast. Without one, it takes a free slot of the standing pool, which needs no start, else
    an ephemeral instance. `pool_wait_s`: seconds until a slot of the pool is free for the task; `pool_usd`: cost of
    this slot.
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
    """Slots that a task of mode `auto` may wait for: a released slot of the pool, or an instance that the pool adds."""

    slots: int  # of one instance
    release_s: float = math.inf  # mean time between two released slots
    boot_s: float = math.inf
    cooldown_s: float = 0.0  # idle time before an instance is removed
    room: int = 0  # slots that the pool may still add, plus slots that are booting

    def wait_s(self, place: int) -> float:
        """Returns the seconds of waiting for the task at position `place` (from 1) of the waiting tasks."""
        return min(place * self.release_s, self.boot_s if place <= self.room else math.inf)

    def usd(self, forecast: Forecast, place: int, waiting: int) -> float:
        """Returns the cost of an awaited slot: its share of a new instance is larger if fewer tasks share the instance.

        waiting: tasks that would share new instances, including tasks on ephemeral instances: a measure of load.
        """
        usd, seconds = forecast.usd[Mode.PERSISTENT], forecast.seconds[Mode.PERSISTENT]
        if self.wait_s(place) >= place * self.release_s or seconds <= 0:
            return usd
        before = (place - 1) // self.slots * self.slots
        sharing = max(1, min(self.slots, waiting - before))
        return usd * self.slots / sharing * (seconds + self.boot_s + self.cooldown_s) / seconds


def choose_by_cost(free_modes: Sequence[Mode], forecast: Forecast, pool_wait_s: float, pool_usd: float) -> Mode | None:
    """Returns the cheapest mode in which the task ends in time; None: waiting for the pool is cheaper.

    In time: before its deadline; without one, no later than if it began now. If no mode is in time: the earliest end.
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
    """Returns the names of the limits that keep the whole queue waiting; empty: its first task may go."""
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
    """Chooses up to `most` tasks to admit now. A waiting task does not block tasks of other queues.

    rooms: for runs and models with a limit, by `QueuedTask.arrival` and `.model`: how many more tasks may go. Tasks
    beyond that are skipped.
    pools: by class, the slots that its tasks of mode `auto` may wait for.

    Changes only the standings: chosen tasks count as held.
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
        if now > rank:  # a task of another queue of this user was admitted in the meantime
            heapq.heappush(heap, (now, queue.identity, position, queue))
            continue
        task, name = queue.waiting[position], queue.resource_class
        mode = choose_mode(queue, left, standing, task.forecast, *_pool(pools, queue, task.forecast, waiters, crowd))
        if mode is None:  # it waits for the pool by choice; later tasks may overtake it
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
    """Returns by class the tasks of mode `auto` without a pool slot now, plus tasks on ephemeral instances."""
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
    """Returns how long the queue's next task would wait for a pool slot, and the cost of that slot."""
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
    """Returns the instances to request so that every dispatched attempt gets one.

    Level-triggered: if an instance fails to boot, the next look requests another.
    """
    gaps = {key: count - coming.get(key, 0) for key, count in unclaimed.items() if key[0] is Mode.EPHEMERAL}
    return Counter({key: gap for key, gap in gaps.items() if gap > 0})


def servable(waiting: Iterable[tuple[str, int]], standings: Mapping[str, UserShare]) -> int:
    """Returns how many waiting tasks could use free slots, within the users' quotas."""
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
    """Returns the standing instances needed for running (`held`) and waiting tasks, within the pool's limits.

    The caller grows the pool at once, and must delay shrinking by the cooldown.
    """
    return min(at_most, max(at_least, -(-(held + waiting) // max(1, slots))))


MEMORY_LEAST = 0.1
"""Share of a host's memory that must be available for one more attempt."""
KV_MOST = 0.9
WAITING_MOST = 0.1
"""Share of an inference server's calls that may wait: runs take longer by the same share."""
_CALM = 0.8
_SHRINK = 0.75
_STEP = 2


def host_pressure(cpu: float, memory_available: float, cpu_most: float) -> float:
    """Returns a host's load; 1: the allowed maximum. Arguments are shares, as in `app.ledger.pressure.HostPressure`."""
    return max(cpu / cpu_most, MEMORY_LEAST / max(memory_available, 1e-6))


def engine_pressure(*, inside: int, waiting: int, queued: int, refused: int, kv_use: float | None) -> float:
    """Returns an inference server's load; 1: the allowed maximum. Counts as in `app.ledger.pressure.EngineLoad`."""
    share = (waiting + queued) / max(1, inside + waiting)
    return max(share / WAITING_MOST, (kv_use or 0.0) / KV_MOST, 1.0 if refused else 0.0)


def next_window(window: float, live: int, pressure: float, least: int = 1) -> float:
    """Returns how many attempts a host or a model may have at once, after a new pressure report.

    Like TCP's window: without pressure, a used window grows by an eighth, at least by 2; under pressure it becomes
    three quarters of the running attempts. `least`: the lower limit of the window.
    """
    if pressure >= 1:
        return max(least, min(window, live * _SHRINK))
    if pressure < _CALM and live + 1 >= window:
        return max(least, window + max(_STEP, window / 8))
    return max(least, window)


def first_window(cores: int) -> int:
    """Returns the attempts that a host may have before its pressure is known; also the minimum under CPU pressure."""
    return max(4, 2 * cores)
