"""What tasks of mode `auto` are expected to take and to cost: learned durations, and prices by provider and class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy import Connection

from app.ledger.classes import ResourceClass
from app.models.spec import Mode
from app.scheduling.durations import Durations, Learned, PendingTask
from app.scheduling.policy import Forecast, Key, PoolOutlook

Price = Callable[[str, str], float | None]
"""USD for an hour of one instance of a provider, by its name and the resource class; None: unknown."""

_MODES = (Mode.EPHEMERAL, Mode.PERSISTENT)


class Forecasts:
    """One dispatcher's. `price`: of instances; where one of a class's two providers has none, both cost the same."""

    def __init__(self, price: Price | None = None) -> None:
        self._price = price
        self._durations = Durations()

    def of(self, connection: Connection, defined: ResourceClass, task_ids: Sequence[UUID]) -> dict[UUID, Forecast]:
        """Of those of these tasks whose like has ended in both modes, or in one: then the other takes as long."""
        self._durations.refresh(connection)
        prices = self._prices(defined)
        found = {}
        for task_id, pending in self._durations.pending(connection, task_ids).items():
            learned = self._durations.of(pending.kind)
            if learned is not None:
                found[task_id] = self._forecast(pending, learned, defined, prices)
        return found

    def outlooks(self, classes: Iterable[ResourceClass], capacity: Mapping[Key, int]) -> dict[str, PoolOutlook]:
        """What may be waited for in each class's pool, as far as anything is known. `capacity`: slots that stand."""
        learned = self._durations.of_all()
        held_s, boot_s = learned.held_s.get(Mode.PERSISTENT), learned.start_s.get(Mode.EPHEMERAL, math.inf)
        found = {}
        for one in classes:
            key = (Mode.PERSISTENT, one.name)
            slots = capacity.get(key, 0)
            release_s = held_s / slots if held_s is not None and slots else math.inf
            room = max(0, one.pool_max * one.pool_slots - slots)
            found[one.name] = PoolOutlook(one.pool_slots, release_s, boot_s, one.pool_cooldown_s, room)
        return found

    def _forecast(
        self, pending: PendingTask, learned: Learned, defined: ResourceClass, prices: Mapping[Mode, float]
    ) -> Forecast:
        known_s = next(iter(learned.held_s.values()))
        starts_s = {**self._durations.of_all().start_s, **learned.start_s}
        seconds = {mode: starts_s.get(mode, 0.0) + learned.held_s.get(mode, known_s) for mode in _MODES}
        usd = {
            Mode.EPHEMERAL: seconds[Mode.EPHEMERAL] * prices[Mode.EPHEMERAL] / 3600,
            Mode.PERSISTENT: seconds[Mode.PERSISTENT] * prices[Mode.PERSISTENT] / 3600 / max(1, defined.pool_slots),
        }
        due_s = None
        if pending.deadline_at is not None:
            due_s = (pending.deadline_at - datetime.now(UTC)).total_seconds()
        return Forecast(seconds, usd, due_s)

    def _prices(self, defined: ResourceClass) -> dict[Mode, float]:
        providers = {Mode.EPHEMERAL: defined.ephemeral_provider, Mode.PERSISTENT: defined.persistent_provider}
        if self._price is None:
            return dict.fromkeys(_MODES, 1.0)
        found = {mode: self._price(provider, defined.name) for mode, provider in providers.items()}
        known = {mode: price for mode, price in found.items() if price is not None}
        return known if len(known) == len(_MODES) else dict.fromkeys(_MODES, 1.0)
