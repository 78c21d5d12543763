"""Renews the leases of all simulated attempts in one statement, and sends heartbeats of instances."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from uuid import UUID

from app.ledger import attempts, instances
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.states import InstanceState
from app.settings import Settings
from app.simulation.batches import BatchWriter, Verb
from app.simulation.clock import SimulationClock


class RenewalBatch(NamedTuple):
    """What is renewed in one go."""

    attempts: list[UUID]
    standing: list[UUID]  # instances


class Answered(NamedTuple):
    """Attempts whose lease stands, and why they must stop, if so; standing instances that have not ended."""

    attempts: dict[UUID, EndReason | None]
    standing: dict[UUID, InstanceState]


class Holder(Protocol):
    """The owner of the attempts and instances; every call is on the clock's thread."""

    def in_hand(self) -> RenewalBatch:
        """What can be renewed now: all that does not stand still."""

    def cancel(self, attempt_id: UUID, reason: EndReason) -> None:
        """It must stop."""

    def lapsed(self, attempt_id: UUID) -> None:
        """It belongs to another instance by now, if it has not ended by itself."""

    def drain(self, instance_id: UUID) -> None:
        """It shall finish what it has, take nothing new, and leave."""

    def closed(self, instance_id: UUID) -> None:
        """The ledger has closed the row of this instance."""

    def cannot_renew(self) -> None:
        """The leases are about to lapse: stop all work."""

    def orphaned(self) -> None:
        """The control plane is gone."""


class Leases:
    """Renews every third of `lease_s`; stops work before a lease that could not be renewed lapses."""

    def __init__(self, database: Database, settings: Settings, clock: SimulationClock, holder: Holder) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._holder = holder
        self._renewed_at = time.monotonic()
        self.renewed = 0
        self.verb = Verb("renew", self._write, self._heard)

    def start(self, writer: BatchWriter) -> None:
        """Renew by this writer from here on."""
        self._ask(writer)
        self._watch()

    def _ask(self, writer: BatchWriter) -> None:
        self._clock.after(self._settings.lease_s / 3, self._ask, writer)
        writer.put("renew", self._holder.in_hand())

    def _write(self, asked: Sequence[RenewalBatch]) -> Answered:
        newest = asked[-1]  # older ones waited for PostgreSQL
        standing, held = newest.standing, newest.attempts
        return Answered(
            attempts.renew(self._database, held, lease_s=self._settings.lease_s) if held else {},
            instances.seen_many(self._database, standing) if standing else {},
        )

    def _heard(self, asked: Sequence[RenewalBatch], answered: Answered) -> None:
        self._renewed_at = time.monotonic()
        self.renewed += len(answered.attempts)
        for attempt_id in asked[-1].attempts:
            if attempt_id not in answered.attempts:
                self._holder.lapsed(attempt_id)
            elif (reason := answered.attempts[attempt_id]) is not None:
                self._holder.cancel(attempt_id, reason)
        for instance_id in asked[-1].standing:
            match answered.standing.get(instance_id):
                case None:
                    self._holder.closed(instance_id)
                case InstanceState.DRAINING:
                    self._holder.drain(instance_id)

    def _watch(self) -> None:
        self._clock.after(0.5, self._watch)
        silent_s = time.monotonic() - self._renewed_at
        if silent_s > self._settings.lease_s * 0.8:
            self._holder.cannot_renew()
        if silent_s > self._settings.orphan_s:
            self._holder.orphaned()
