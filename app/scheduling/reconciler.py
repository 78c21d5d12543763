"""Compares what the ledger believes with what exists, and repairs the difference.

Everything here is safe to run twice at once, and to stop anywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog

from app.errors import DatabaseUnavailable, StationError
from app.ledger import connections, deadlines, instances, replicas, semaphores, tasks, waiting
from app.ledger.database import RECONCILER, Database, Leadership
from app.ledger.instances import LiveInstance
from app.models.endings import RetryPolicy
from app.models.instance import InstanceMode
from app.settings import Settings

log = structlog.get_logger()

_BOOTING = ("requested", "booting")
_YOUNG_S = 5.0
"""An instance this young may not be in its provider's list yet."""
_CLOCKS_S = 1.0
"""Between two looks at what runs out: leases, deadlines, places at semaphores."""
_GONE_GRACE_S = 20.0
"""An ephemeral instance whose attempt has ended may tear down and leave within this time."""


@dataclass(frozen=True, slots=True)
class Hands:
    """What the reconciler can do to the world; wired by the control worker."""

    alive: Callable[[], dict[str, dict[UUID, str]]]
    """By provider: the instances that exist. A provider that does not answer is left out."""
    terminate: Callable[[str, UUID, str], None]
    """Provider, instance, handle."""
    lead_here: Callable[[], None]
    """Tell this host, again and again, that the lead is here: what it sweeps is what our instances made."""
    nudge: Callable[[Sequence[UUID]], None]
    """Tell running attempts at once that they must stop."""
    started: Callable[[], dict[str, dict[UUID, float | None]]] = dict
    """By provider with a queue of its own: seconds since instances began to run; None: they wait there."""


class Reconciler:
    """`run` blocks until told to stop; looks at the instances every `sweep_s`.

    What only runs out (leases, deadlines, places) is looked at every second, which costs a few probes of an index. What
    instances leave behind is for every host itself to remove.
    """

    def __init__(self, database: Database, settings: Settings, hands: Hands) -> None:
        self._database = database
        self._settings = settings
        self._hands = hands
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
        self._connections = connections.LostConnections()

    def run(self, stop: threading.Event) -> None:
        lead = Leadership(self._database, RECONCILER)
        try:
            while not stop.is_set():
                try:
                    leads = lead.held()
                    if leads:
                        self.sweep()
                    self._wait(stop, leads=leads)
                except (DatabaseUnavailable, StationError) as error:
                    log.warning("reconciler.interrupted", error=str(error))
                    stop.wait(1.0)
        finally:
            lead.release()

    def _wait(self, stop: threading.Event, *, leads: bool) -> None:
        until = time.monotonic() + self._settings.sweep_s
        while (left_s := until - time.monotonic()) > 0 and not stop.wait(min(_CLOCKS_S, left_s)):
            if leads:
                self.watch_clocks()

    def watch_clocks(self) -> None:
        """Take back what has run out, and tell those that run what they have to know."""
        self._hands.lead_here()
        semaphores.sweep(self._database)
        self._close_lost()
        with self._database.begin() as connection:
            taken = waiting.reclaim_lapsed(connection, self._retry)
            expired = deadlines.expire(connection, self._retry)
        if taken:
            log.warning("reconciler.reclaimed", attempts=[str(attempt_id) for attempt_id in taken[:20]])
        due = replicas.tend(self._database, self._settings.lease_s, self._retry)
        told = taken + expired + tasks.settle_cancelled(self._database) + due.stop
        if told:
            self._hands.nudge(told)
        for instance in instances.live(self._database, due.silent) if due.silent else ():
            if instance.mode is InstanceMode.EPHEMERAL:  # others have more on board, and their leases lapse
                self._end(instance, "its attempt was superseded, and it does not answer")

    def _close_lost(self) -> None:
        """Standing instances without a provider, whose connection is gone, or who have been silent for a lease."""
        silent_s = instances.standing(self._database)
        if not silent_s:
            return
        held, settled = connections.locked(self._database)
        gone = dict.fromkeys(self._connections.look(silent_s, held, settled=settled), "its connection closed")
        if settled:
            gone |= {one: "no sign of life" for one, silent in silent_s.items() if silent > self._settings.lease_s}
        if gone:
            log.warning("reconciler.instances_lost", instances={str(one): why for one, why in gone.items()})
            exits = [instances.Exit(one, None, why) for one, why in gone.items()]
            instances.exited_many(self._database, exits, self._retry)

    def sweep(self) -> None:
        """One pass over clocks and instances."""
        self.watch_clocks()
        self._check_instances()
        self._quarantine()

    def _quarantine(self) -> None:
        """A standing instance on which one task after the other fails takes nothing new, and is replaced."""
        with self._database.begin() as connection:
            failing = instances.failing(connection, self._settings.quarantine_after)
        if failing:
            why = f"quarantine: its last {self._settings.quarantine_after} attempts failed for infrastructure reasons"
            log.error("reconciler.quarantined", instances=[str(i) for i in failing], why=why)
            instances.drain(self._database, failing, why)
            self._hands.nudge(failing)

    def _check_instances(self) -> None:
        live = instances.live(self._database)  # before the providers' lists: what has a handle now must be in them
        existing = self._hands.alive()
        unnamed = [one for one in live if one.handle is None]  # the answer to their launch was lost
        found = {one.id: existing[one.provider][one.id] for one in unnamed if one.id in existing.get(one.provider, {})}
        instances.launched(self._database, found)
        late = any(one.state in _BOOTING and one.age_s > self._settings.boot_timeout_s for one in live)
        started = self._hands.started() if late else {}
        with self._database.begin() as connection:
            lingering = {found[0] for found in instances.outlived(connection, _GONE_GRACE_S)}
        for instance in live:
            why = "its attempt has ended, and it stayed" if instance.id in lingering else None
            why = why or self._fault(instance, existing) or self._not_ready(instance, started)
            if why is not None:
                self._end(instance, why)
        known = instances.live_ids(self._database)
        for provider, found in existing.items():
            for instance_id, handle in found.items():
                if instance_id not in known:
                    self._hands.terminate(provider, instance_id, handle)

    def _fault(self, instance: LiveInstance, existing: dict[str, dict[UUID, str]]) -> str | None:
        """Why this instance must be closed, or None."""
        if instance.overdue:
            return "past its deadline"
        if instance.provider == "static":
            return None
        found = existing.get(instance.provider)
        asked = instance.handle is not None or instance.state != "requested"
        if asked and found is not None and instance.id not in found and instance.age_s > _YOUNG_S:
            return "its provider no longer has it"
        return None

    def _not_ready(self, instance: LiveInstance, started: dict[str, dict[UUID, float | None]]) -> str | None:
        """Why an instance that has not reported itself must be closed. One in a queue has more time than to boot."""
        run_s = started[instance.provider].get(instance.id) if instance.provider in started else instance.age_s
        if instance.state not in _BOOTING:
            return None
        if run_s is not None and run_s > self._settings.boot_timeout_s:
            return f"not ready within {self._settings.boot_timeout_s:.0f} s"
        if instance.age_s > self._settings.queue_timeout_s and run_s is None:
            return f"no capacity: not started by its provider's queue within {self._settings.queue_timeout_s:.0f} s"
        return None

    def _end(self, instance: LiveInstance, why: str) -> None:
        log.warning("reconciler.instance_ended", instance_id=str(instance.id), why=why)
        if instance.handle is not None and instance.provider != "static":
            self._hands.terminate(instance.provider, instance.id, instance.handle)
        instances.exited(self._database, instance.id, None, why, self._retry)
