"""Dispatches tasks: admits tasks, requests instances, publishes wake-up messages.

Woken by NOTIFY, decides in batches. Any number of dispatchers may stand by; one decides at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog
from sqlalchemy import Connection

from app.errors import DatabaseUnavailable, InstanceFailed, LaunchUnclear
from app.ledger import (
    admission,
    classes,
    gradings,
    graphs,
    instances,
    model_sessions,
    pauses,
    pressure,
    quotas,
    waiting,
)
from app.ledger.admission import QueuedMessage
from app.ledger.classes import ResourceClass
from app.ledger.database import DISPATCHER, Database, Leadership, Listener
from app.ledger.events import WORK
from app.ledger.host_images import ImageKey
from app.ledger.instances import InstanceDemand
from app.ledger.waiting import BoundedRun, Occupancy, QueueKey, QueueLimit, WaitingTask
from app.models.endings import RetryPolicy
from app.models.instance import InstanceMode, InstanceRequest
from app.models.spec import Mode
from app.scheduling import policy, pools
from app.scheduling.forecasts import Forecasts, Price
from app.scheduling.placer import Head, Placer
from app.scheduling.policy import Decision, DispatchOrder, Forecast, Key, TaskQueue, UserShare
from app.scheduling.pools import FailingPools, Rests, Surplus
from app.scheduling.pressure import Windows, Withheld
from app.settings import Settings

log = structlog.get_logger()

Launch = Callable[[str, Sequence[InstanceRequest]], dict[UUID, str]]
"""Requests instances from a provider, by name; returns the handles of started ones. Raises: as `Provider.launch`."""
Publish = Callable[[Sequence[QueuedMessage]], None]
"""Puts messages into their queues. Raises the broker's errors: the messages are sent again later."""

_STILLBORN = 5
"""Number of consecutive failed launches after which no instances are requested for some time."""
_HOUSEKEEPING_S = 2.0
"""Interval of checks without events: instances never requested, unclaimed messages, idle pools."""
_AT_HOST_S = 1.0
"""Time after which an unclaimed message of a host goes to all hosts: the host may be dead, or its slots in use."""
_POOL_GONE_S = 5.0
"""Time that attempts dispatched to a removed pool wait for it to come back; then they are queued again."""
_MOST_REST_S = 0.1
"""Longest pause after a look. The pause is as long as the look took, up to this limit."""


class Dispatcher:
    """A stand-by or deciding dispatcher; `run` blocks until its event is set.

    image_key: returns the hosts' name of an environment's image; if set, tasks go to hosts with their image. price: of
    instances; if set, tasks of mode `auto` go where they are cheapest.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        launch: Launch,
        publish: Publish,
        image_key: ImageKey | None = None,
        price: Price | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._launch = launch
        self._publish = publish
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
        self._rests = Rests()
        self._surplus = Surplus()
        self._placer = Placer(image_key)
        self._forecasts = Forecasts(price)
        self._windows = Windows(settings.host_cpu_most)
        self._failing = FailingPools(settings.pool_rest_s)
        self._bound: set[QueueLimit] | None = None  # recorded as limiting; None: not read yet
        self._kept_house_at = -_HOUSEKEEPING_S

    def run(self, stop: threading.Event) -> None:
        """Decides after each change, and at least every second."""
        lead, listener = Leadership(self._database, DISPATCHER), Listener(self._database, WORK)
        try:
            while not stop.is_set():
                try:
                    due_s = 1.0
                    if lead.held():
                        due_s = self._decide(stop)
                    else:
                        self._forget()
                    listener.wait(due_s)
                except DatabaseUnavailable as error:
                    log.warning("dispatcher.database_unavailable", error=str(error))
                    self._forget()
                    stop.wait(1.0)
        finally:
            listener.close()
            lead.release()

    def _forget(self) -> None:
        """Clears caches that may be stale: another dispatcher may have decided since."""
        self._bound = None
        self._surplus.forget()
        self._placer.forget()
        self._windows.forget()

    def _decide(self, stop: threading.Event) -> float:
        """Looks until nothing is left to do; returns the longest sleep. Many wake-ups use at most half of the time."""
        began = time.monotonic()
        while self.pass_once() and not stop.is_set():
            pass
        stop.wait(min(_MOST_REST_S, time.monotonic() - began))
        with self._database.begin() as connection:
            due_s = admission.next_due_s(connection)
        return 1.0 if due_s is None else max(0.005, min(1.0, due_s))

    def pass_once(self) -> bool:
        """Looks once and admits one batch. True: there may be more to do at once."""
        settings = self._settings
        keep_house = time.monotonic() - self._kept_house_at >= min(_HOUSEKEEPING_S, settings.republish_s)
        if keep_house:
            self._kept_house_at = time.monotonic()
        with self._database.begin() as connection:
            admission.in_turn(connection)
            graphs.settle(connection, 10 * settings.dispatch_batch)
            promoted = admission.promote(connection, 10 * settings.dispatch_batch)
            seen = waiting.occupancy(connection)
            defined = classes.load(connection, settings)
            view = self._view(connection, defined, seen)
            decision, hosts, more = self._choose(connection, view)
            admitted = admission.admit(connection, decision.chosen, hosts) if decision.chosen else []
            seen.unclaimed.update((Mode(item.mode), item.resource_class) for item in admitted)
            demands = self._demands(connection, view)
            requested = [(want, instances.request(connection, want)) for want in demands]
            due = admitted
            if keep_house:  # includes attempts just admitted, without their host: `admitted` overrides
                due = admission.unpublished(connection, settings.republish_s, 1000, at_host_s=_AT_HOST_S) + admitted
            due = due + gradings.unpublished(connection, settings.republish_s)
            self._note_limits(connection, decision, view)
        self._send({item.message.attempt_id: item for item in due})
        for want, ids in requested:
            self._start(want, ids, defined.get(want.resource_class))
        if keep_house:
            self._keep_house(defined)
        if admitted:
            log.info("dispatcher.admitted", attempts=len(admitted))
        return bool(admitted) and (more or promoted >= 10 * settings.dispatch_batch)

    # --- Choosing ---------------------------------------------------------------------------------------------------

    def _view(self, connection: Connection, defined: dict[str, ResourceClass], seen: Occupancy) -> DispatchView:
        book = quotas.load(connection)
        keys = waiting.queues(connection)
        standings = {user: _standing(user, book, seen) for user in {key.user_name for key in keys}}
        bounded = waiting.bounded_runs(connection)
        failing = self._failing.look(connection, defined.values())
        return DispatchView(defined, seen, keys, standings, bounded, self._windows.look(connection), failing)

    def _choose(self, connection: Connection, view: DispatchView) -> tuple[Decision, dict[UUID, str], bool]:
        """Chooses tasks and their hosts, if any. True: the batch size, not a limit, kept a task waiting."""
        seen, standings, withheld = view.seen, view.standings, view.withheld
        capacity = withheld.less(_capacity(view.classes, seen))
        free = policy.free_slots(capacity, seen.live - seen.draining)
        held_up: dict[tuple[Mode, str, str], tuple[str, ...]] = {}
        open_queues: list[QueueKey] = []
        for key in view.queues:
            bare = TaskQueue(key.user_name, key.mode, key.resource_class, avoids_pool=view.avoids_pool(key))
            why = policy.obstacles(bare, capacity, free, standings[key.user_name])
            if why:
                held_up[key] = why
            else:
                open_queues.append(key)
        rooms = {run.run_id: run.room for run in view.bounded}
        queue_heads = self._queues(connection, open_queues, free, view)
        queues = [queue for queue, _ in queue_heads]
        foreseen = any(task.forecast is not None for queue in queues for task in queue.waiting)
        outlooks = self._forecasts.outlooks(view.classes.values(), capacity) if foreseen else None
        batch = self._settings.dispatch_batch
        decision = policy.admit(
            queues,
            capacity,
            free,
            standings,
            order=DispatchOrder(self._settings.dispatch_order),
            most=batch,
            rooms={**rooms, **withheld.rooms},
            pools=outlooks,
        )
        behind = any(queue.more and queue.identity not in decision.limiting for queue in queues)
        more = len(decision.chosen) >= batch or behind
        chosen, hosts = self._placer.place(connection, seen.spread, queue_heads, decision.chosen, withheld.slots)
        limiting = {key: _by_pressure(names, view) for key, names in {**held_up, **decision.limiting}.items()}
        return Decision(chosen, limiting), hosts, more

    def _queues(
        self, connection: Connection, keys: Sequence[QueueKey], free: dict[Key, int], view: DispatchView
    ) -> list[tuple[TaskQueue, list[Head]]]:
        """Returns the heads of the queues with room: as many as may be admitted, divided if there are many queues; and
        with each queue the tasks that may be exchanged."""
        batch, spread = self._settings.dispatch_batch, view.seen.spread
        counts = {}
        for key in keys:
            modes = (Mode.PERSISTENT, Mode.EPHEMERAL) if key.mode is Mode.AUTO else (key.mode,)
            room = min(batch, sum(free.get((mode, key.resource_class), 0) for mode in modes))
            counts[key] = min(room, max(16, 4 * batch // len(keys)))
        takes = [(key, most + 1 + self._placer.looks_behind(key, spread, len(keys))) for key, most in counts.items()]
        full = [run.run_id for run in view.bounded if not run.room]
        heads = waiting.heads(connection, takes, full, view.withheld.full)
        expected = self._expected(connection, view, {key: heads[key][:most] for key, most in counts.items()})
        return [
            (
                TaskQueue(
                    key.user_name,
                    key.mode,
                    key.resource_class,
                    [
                        policy.QueuedTask(c.task_id, c.priority, c.run_id, c.again, c.model, expected.get(c.task_id))
                        for c in heads[key][:most]
                    ],
                    more=len(heads[key]) > most,
                    avoids_pool=view.avoids_pool(key),
                ),
                [Head(c.task_id, (key, c.priority, c.again, c.run_id, c.model)) for c in heads[key]] if spread else [],
            )
            for key, most in counts.items()
        ]

    def _expected(
        self, connection: Connection, view: DispatchView, heads: Mapping[QueueKey, Sequence[WaitingTask]]
    ) -> dict[UUID, Forecast]:
        """Returns forecasts of the tasks of mode `auto` whose class has both modes."""
        expected: dict[UUID, Forecast] = {}
        for key, tasks in heads.items():
            defined = view.classes.get(key.resource_class)
            if key.mode is Mode.AUTO and tasks and defined and defined.pool_max and defined.ephemeral_capacity:
                expected |= self._forecasts.of(connection, defined, [task.task_id for task in tasks])
        return expected

    def _note_limits(self, connection: Connection, decision: Decision, view: DispatchView) -> None:
        """Records which limits keep which queues waiting, with start and end."""
        if self._bound is None:
            self._bound = set(waiting.open_limits(connection))
        now = {QueueLimit(name, QueueKey(*key)) for key, names in decision.limiting.items() for name in names}
        bounded = waiting.bounded_runs(connection) if view.bounded else ()
        now |= {QueueLimit(run.limit, run.queue) for run in bounded if not run.room}
        held_up = pressure.waiting_for(connection, view.queues, view.withheld.full)
        now |= {QueueLimit(pressure.model_limit(model), queue) for model, queue in held_up}
        if now != self._bound:
            waiting.record_limits(connection, now - self._bound, self._bound - now)
            self._bound = now

    # --- Instances --------------------------------------------------------------------------------------------------

    def _demands(self, connection: Connection, view: DispatchView) -> list[InstanceDemand]:
        seen, defined = view.seen, view.classes
        demands = []
        for (mode, name), gap in policy.missing_ephemeral(seen.unclaimed, seen.coming).items():
            if name in defined:
                provider, lifetime_s = defined[name].ephemeral_provider, self._settings.ephemeral_lifetime_s
                demands.append(InstanceDemand(provider, InstanceMode(mode), name, 1, gap, lifetime_s))
        backlogs = self._backlogs(connection, view)
        for each in defined.values():
            growth = pools.target(each, seen, backlogs, view.standings) - seen.instances[Mode.PERSISTENT, each.name]
            self._surplus.note((InstanceMode.PERSISTENT, each.name), -growth)
            if growth > 0:
                pool = (each.persistent_provider, InstanceMode.PERSISTENT, each.name, each.pool_slots)
                demands.append(InstanceDemand(*pool, growth, None))
            slots, most = self._settings.grading_slots, self._settings.grading_pool()
            growth = pools.graders(each.name, seen, slots=slots, most=most) - seen.graders[each.name]
            self._surplus.note((InstanceMode.GRADING, each.name), -growth)
            if growth > 0:
                demands.append(
                    InstanceDemand(each.persistent_provider, InstanceMode.GRADING, each.name, slots, growth, None)
                )
        return [
            want
            for want in demands
            if not self._rests.resting(want.provider) and seen.stillborn[want.mode, want.resource_class] < _STILLBORN
        ]

    def _backlogs(self, connection: Connection, view: DispatchView) -> dict[QueueKey, int]:
        """Returns the backlogs of the queues of elastic pools, up to the largest pool's slots."""
        sizes = {name: o.pool_max * o.pool_slots for name, o in view.classes.items() if pools.elastic(o)}
        keys = [key for key in view.queues if key.mode is not Mode.EPHEMERAL and key.resource_class in sizes]
        return waiting.backlogs(connection, keys, max(sizes.values(), default=0), view.bounded)

    def _start(self, want: InstanceDemand, ids: Sequence[UUID], size: ResourceClass | None) -> None:
        """Requests instances from the provider; closes those that did not start (requested again at the next look)."""
        requests = [
            InstanceRequest(
                instance_id=instance_id,
                mode=want.mode,
                resource_class=want.resource_class,
                slots=want.slots,
                lifetime_s=want.lifetime_s,
                cpus=size.cpus if size else None,
                memory_bytes=size.memory_bytes if size else None,
                gpus=size.gpus if size else 0,
                architecture=size.architecture if size else None,
            )
            for instance_id in ids
        ]
        why = "the provider did not start it"
        handles: dict[UUID, str] = {}
        try:
            handles = self._launch(want.provider, requests)
        except LaunchUnclear as error:
            log.warning("dispatcher.launch_unclear", provider=want.provider, error=str(error))
            self._rests.failed(want.provider, wholly=True)
            return  # the rows stay without handles and are requested again, see `_keep_house`
        except InstanceFailed as error:
            why = str(error)
            log.warning("dispatcher.launch_failed", provider=want.provider, error=why)
        instances.launched(self._database, handles)
        lost = [instances.Exit(instance_id, None, why) for instance_id in ids if instance_id not in handles]
        if lost:
            self._rests.failed(want.provider, wholly=not handles)
        else:
            self._rests.worked(want.provider)
        instances.exited_many(self._database, lost, self._retry)

    def _keep_house(self, defined: dict[str, ResourceClass]) -> None:
        """Handles cases without events: rows never sent to their provider, idle instances, spent budgets."""
        if spent := pauses.hold_spent(self._database):
            log.info("dispatcher.budgets_spent", runs=[str(run_id) for run_id in spent])
        model_sessions.settle_lost(self._database)
        with self._database.begin() as connection:
            forgotten = instances.pending_requests(connection, _HOUSEKEEPING_S, 1000)
            seen = waiting.occupancy(connection)
            names = [o.name for o in defined.values() if not o.pool_max and not seen.instances[Mode.PERSISTENT, o.name]]
            admission.unseat(connection, names, older_than_s=_POOL_GONE_S)
            spare = [
                one
                for each in defined.values()
                for mode in (InstanceMode.PERSISTENT, InstanceMode.GRADING)
                if (count := self._surplus.due((mode, each.name), each.pool_cooldown_s))
                for one in instances.least_busy(connection, mode, each.name, count)
            ]
        for instance_id, demand in forgotten:
            if not self._rests.resting(demand.provider):  # else the row stays and is requested at the next look
                self._start(demand, [instance_id], defined.get(demand.resource_class))
        if spare:
            log.info("dispatcher.pool_shrinks", instances=[str(i) for i in spare])
            instances.drain(self._database, spare, "the pool needs fewer")

    # --- Messages ---------------------------------------------------------------------------------------------------

    def _send(self, due: dict[UUID, QueuedMessage]) -> None:
        if not due:
            return
        items = list(due.values())
        try:
            self._publish(items)
        except Exception as error:  # noqa: BLE001  after any broker error the rows are safe and sent again
            log.warning("dispatcher.publish_failed", messages=len(items), error=str(error))
            self._kept_house_at = -_HOUSEKEEPING_S  # the next look sends them again
            return
        with self._database.begin() as connection:
            admission.mark_published(connection, [item for item in items if item.mode is not InstanceMode.GRADING])
            queued = [item.message.attempt_id for item in items if item.mode is InstanceMode.GRADING]
            gradings.mark_published(connection, queued)


@dataclass(frozen=True, slots=True)
class DispatchView:
    """State seen by one look. `queues`: with waiting tasks; `standings`: of the users of these queues.

    `bounded`: their runs with a limit of attempts at once; `withheld`: slots and room taken away by pressure;
    `failing`: classes whose pool fails.
    """

    classes: dict[str, ResourceClass]
    seen: Occupancy
    queues: list[QueueKey]
    standings: dict[str, UserShare]
    bounded: list[BoundedRun]
    withheld: Withheld
    failing: frozenset[str]

    def avoids_pool(self, key: QueueKey) -> bool:
        return key.mode is Mode.AUTO and key.resource_class in self.failing


def _by_pressure(names: tuple[str, ...], view: DispatchView) -> tuple[str, ...]:
    """Replaces the limits of pools with unused slots by the pressure limit, which is the limiting factor there."""
    bound = {
        f"{what}:persistent.{name}": pressure.host_limit(name)
        for name in {name for _, name in view.withheld.slots}
        for what in ("slots", "pool")
        if view.seen.live[Mode.PERSISTENT, name] < view.seen.slots[Mode.PERSISTENT, name]
    }
    return tuple(bound.get(name, name) for name in names)


def _capacity(defined: dict[str, ResourceClass], seen: Occupancy) -> dict[Key, int]:
    """Returns slots by mode and class: allowed ones for ephemeral, those of standing instances for persistent."""
    capacity = {key: slots for key, slots in seen.slots.items() if key[0] is Mode.PERSISTENT}
    return capacity | {(Mode.EPHEMERAL, name): each.ephemeral_capacity for name, each in defined.items()}


def _standing(user_name: str, book: quotas.Quotas, seen: Occupancy) -> UserShare:
    quota = book.of(user_name)
    standing = UserShare(
        weight=quota.weight,
        running_quota=quota.running,
        instances_quota=quota.instances,
        spent_up=quota.spend_usd is not None and book.spent(user_name) >= quota.spend_usd,
    )
    for (user, key), count in seen.by_user.items():
        if user == user_name:
            standing.live[key] = count
    return standing
