"""The net under the events: compares what the ledger believes with what exists, and mends the difference.

Everything here is safe to run twice at once, and to stop anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

import structlog

from app.errors import DatabaseUnavailable, StationError
from app.ledger import instances, waiting
from app.ledger.attempts import RetryPolicy
from app.ledger.database import RECONCILER, Database, Leadership, Listener
from app.ledger.events import WORK
from app.ledger.instances import Live
from app.settings import Settings

log = structlog.get_logger()

_YOUNG_S = 5.0
"""An instance this young may not be in its provider's list yet."""
_SILENT_S = 60.0
"""A standing instance that nobody watches and that says nothing for so long is gone."""


@dataclass(frozen=True, slots=True)
class Hands:
    """What the reconciler can do to the world; wired by the control worker."""

    alive: Callable[[], dict[str, dict[UUID, str]]]
    """By provider: the instances that exist. A provider that does not answer is left out."""
    terminate: Callable[[str, UUID, str], None]
    """Provider, instance, handle."""
    sweep: Callable[[set[UUID]], int]
    """Remove every environment that belongs to none of these instances, or is past its deadline; how many."""


class Reconciler:
    """`run` blocks until told to stop; sweeps every `sweep_s`, and at once when an instance has ended."""

    def __init__(self, database: Database, settings: Settings, hands: Hands) -> None:
        self._database = database
        self._settings = settings
        self._hands = hands
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)

    def run(self, stop: threading.Event) -> None:
        lead, listener = Leadership(self._database, RECONCILER), Listener(self._database, WORK)
        try:
            while not stop.is_set():
                try:
                    if lead.held():
                        self.sweep()
                    self._wait(listener, stop)
                except (DatabaseUnavailable, StationError) as error:
                    log.warning("reconciler.interrupted", error=str(error))
                    stop.wait(1.0)
        finally:
            listener.close()
            lead.release()

    def _wait(self, listener: Listener, stop: threading.Event) -> None:
        """Until the next sweep is due; sooner when an instance has ended and may have left something behind."""
        for _ in range(int(self._settings.sweep_s / 0.5)):
            listener.wait(0.5)
            if stop.is_set() or instances.unswept(self._database):
                return

    def sweep(self) -> None:
        """One pass over leases, instances and environments."""
        with self._database.begin() as connection:
            taken = waiting.reclaim_lapsed(connection, self._retry)
        if taken:
            log.warning("reconciler.reclaimed", attempts=[str(attempt_id) for attempt_id in taken])
        self._check_instances()
        gone = instances.unswept(self._database)
        removed = self._hands.sweep(instances.live_ids(self._database))
        if removed:
            log.warning("reconciler.swept", environments=removed)
        instances.swept(self._database, gone)

    def _check_instances(self) -> None:
        existing = self._hands.alive()
        live = instances.live(self._database)
        for instance in live:
            why = self._fault(instance, existing)
            if why is not None:
                self._end(instance, why)
        known = {instance.id for instance in instances.live(self._database)}
        for provider, found in existing.items():
            for instance_id, handle in found.items():
                if instance_id not in known:
                    self._hands.terminate(provider, instance_id, handle)

    def _fault(self, instance: Live, existing: dict[str, dict[UUID, str]]) -> str | None:
        """Why this instance must be closed, or None."""
        if instance.overdue:
            return "past its deadline"
        if instance.state in ("requested", "booting") and instance.age_s > self._settings.boot_timeout_s:
            return f"not ready within {self._settings.boot_timeout_s:.0f} s"
        if instance.provider == "static":
            return "no sign of life" if instance.silent_s > _SILENT_S else None
        found = existing.get(instance.provider)
        if found is not None and instance.id not in found and instance.age_s > _YOUNG_S:
            return "its provider no longer has it"
        return None

    def _end(self, instance: Live, why: str) -> None:
        log.warning("reconciler.instance_ended", instance_id=str(instance.id), why=why)
        if instance.handle is not None and instance.provider != "static":
            self._hands.terminate(instance.provider, instance.id, instance.handle)
        instances.exited(self._database, instance.id, None, why, self._retry)
