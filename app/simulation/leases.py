"""Renews the leases of all simulated attempts in one statement, and sends heartbeats of instances."""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from app.ledger import attempts, instances
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.states import InstanceState
from app.settings import Settings
from app.simulation.batches import BatchWriter, Verb

if TYPE_CHECKING:
    from app.simulation.fleet import Fleet


class RenewalBatch(NamedTuple):
    """Attempts and instances renewed together."""

    attempts: list[UUID]
    standing: list[UUID]  # instances


class Answered(NamedTuple):
    """Attempts with a valid lease, with the reason if they must stop; standing instances that have not ended."""

    attempts: dict[UUID, EndReason | None]
    standing: dict[UUID, InstanceState]


class Leases:
    """Renews leases every third of `lease_s`; stops work before a lease lapses that could not be renewed."""

    def __init__(self, database: Database, settings: Settings, clock: AbstractEventLoop, fleet: Fleet) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._fleet = fleet
        self._renewed_at = time.monotonic()
        self.renewed = 0
        self.verb = Verb("renew", self._write, self._heard)

    def start(self, writer: BatchWriter) -> None:
        """Starts renewing with this writer."""
        self._ask(writer)
        self._watch()

    def _ask(self, writer: BatchWriter) -> None:
        self._clock.call_later(self._settings.lease_s / 3, self._ask, writer)
        writer.put("renew", self._fleet.in_hand())

    def _write(self, asked: Sequence[RenewalBatch]) -> Answered:
        newest = asked[-1]  # older batches were delayed by PostgreSQL
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
                self._fleet.work.lapsed(attempt_id)
            elif (reason := answered.attempts[attempt_id]) is not None:
                self._fleet.work.cancel(attempt_id, reason)
        for instance_id in asked[-1].standing:
            match answered.standing.get(instance_id):
                case None:
                    self._fleet.closed(instance_id)
                case InstanceState.DRAINING:
                    self._fleet.drain(instance_id)

    def _watch(self) -> None:
        self._clock.call_later(0.5, self._watch)
        silent_s = time.monotonic() - self._renewed_at
        if silent_s > self._settings.lease_s * 0.8:
            self._fleet.work.stop_all()
        if silent_s > self._settings.orphan_s:
            self._fleet.orphaned()
