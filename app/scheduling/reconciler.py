"""Compares the ledger with what exists, and repairs the differences.

All code here may safely run twice at the same time, and be stopped at any point.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog

from app.errors import DatabaseUnavailable, StationError
from app.ledger import connections, instances, replicas, semaphores, tasks, waiting
from app.ledger.database import RECONCILER, Database, Leadership
from app.ledger.instances import LiveInstance
from app.models.endings import RetryPolicy
from app.models.instance import InstanceMode
from app.settings import Settings

log = structlog.get_logger()

_BOOTING = ("requested", "booting")
_YOUNG_S = 5.0
"""Age up to which an instance may be missing in its provider's list."""
_CLOCKS_S = 1.0
"""Interval of checking expiries: leases, deadlines, places at semaphores."""
_GONE_GRACE_S = 20.0
"""Time that an ephemeral instance has for teardown and exit after its attempt has ended."""


@dataclass(frozen=True, slots=True)
class Hands:
    """External actions of the reconciler; provided by the control worker."""

    alive: Callable[[], dict[str, dict[UUID, str]]]
    """Returns the existing instances by provider. A provider without an answer is left out."""
    terminate: Callable[[str, UUID, str], None]
    """Terminates an instance. Arguments: provider, instance, handle."""
    lead_here: Callable[[], None]
    """Marks this host, regularly, as the leader's: its sweep then includes the instances launched from here."""
    nudge: Callable[[Sequence[UUID]], None]
    """Notifies running attempts at once that they must stop."""
    started: Callable[[], dict[str, dict[UUID, float | None]]] = dict
    """Returns, for providers with their own queue, seconds since each instance began to run; None: it waits."""


class Reconciler:
    """Checks the instances every `sweep_s`; `run` blocks until its event is set.

    Expiries (leases, deadlines, places) are checked every second, which costs a few index lookups. Leftovers of
    instances are removed by each host itself.
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
        """Reclaims expired leases, deadlines and places, and notifies running attempts that must stop."""
        self._hands.lead_here()
        semaphores.sweep(self._database)
        self._close_lost()
        with self._database.begin() as connection:
            reclaimed = waiting.reclaim_lapsed(connection, self._retry)
            expired = tasks.expire(connection, self._retry)
        if reclaimed:
            log.warning("reconciler.reclaimed", attempts=[str(attempt_id) for attempt_id in reclaimed[:20]])
        due = replicas.tend(self._database, self._settings.lease_s, self._retry)
        stopping = reclaimed + expired + tasks.settle_cancelled(self._database) + due.stop
        if stopping:
            self._hands.nudge(stopping)
        for instance in instances.live(self._database, due.silent) if due.silent else ():
            if instance.mode is InstanceMode.EPHEMERAL:  # others run more attempts, and the leases lapse
                self._end(instance, "its attempt was superseded, and it does not answer")

    def _close_lost(self) -> None:
        """Closes standing instances without a provider that lost their connection or were silent for a lease."""
        silent_s = instances.standing(self._database)
        if not silent_s:
            return
        held, settled = connections.locked(self._database)
        lost = dict.fromkeys(self._connections.look(silent_s, held, settled=settled), "its connection closed")
        if settled:
            lost |= {one: "no sign of life" for one, silent in silent_s.items() if silent > self._settings.lease_s}
        if lost:
            log.warning("reconciler.instances_lost", instances={str(one): why for one, why in lost.items()})
            exits = [instances.Exit(one, None, why) for one, why in lost.items()]
            instances.exited_many(self._database, exits, self._retry)

    def sweep(self) -> None:
        """Checks expiries and instances once."""
        self.watch_clocks()
        self._check_instances()
        self._quarantine()

    def _quarantine(self) -> None:
        """Drains standing instances on which consecutive attempts fail; the dispatcher replaces them."""
        with self._database.begin() as connection:
            failing = instances.failing(connection, self._settings.quarantine_after)
        if failing:
            why = f"quarantine: its last {self._settings.quarantine_after} attempts failed for infrastructure reasons"
            log.error("reconciler.quarantined", instances=[str(i) for i in failing], why=why)
            instances.drain(self._database, failing, why)
            self._hands.nudge(failing)

    def _check_instances(self) -> None:
        live = instances.live(self._database)  # before the providers' lists: these must contain every handle in it
        existing = self._hands.alive()
        unnamed = [one for one in live if one.handle is None]  # the response to their launch was lost
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
        """Returns why this instance must be closed; None: it need not."""
        if instance.overdue:
            return "past its deadline"
        if instance.provider == "static":
            return None
        handles = existing.get(instance.provider)
        launched = instance.handle is not None or instance.state != "requested"
        if launched and handles is not None and instance.id not in handles and instance.age_s > _YOUNG_S:
            return "its provider no longer has it"
        return None

    def _not_ready(self, instance: LiveInstance, started: dict[str, dict[UUID, float | None]]) -> str | None:
        """Returns why an instance that is not ready must be closed; None: not yet. Queued instances get more time."""
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
