"""Forecasts time and cost of tasks of mode `auto`: learned durations, and prices by provider and class."""

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
"""Price in USD per instance-hour, by name of the provider and resource class; None: unknown."""

_MODES = (Mode.EPHEMERAL, Mode.PERSISTENT)


class Forecasts:
    """Forecasts of a dispatcher. `price`: of instances; unless both providers of a class have one, costs are equal."""

    def __init__(self, price: Price | None = None) -> None:
        self._price = price
        self._durations = Durations()

    def of(self, connection: Connection, defined: ResourceClass, task_ids: Sequence[UUID]) -> dict[UUID, Forecast]:
        """Returns forecasts for tasks with known durations. If known in one mode only, the other takes as long."""
        self._durations.refresh(connection)
        prices = self._prices(defined)
        forecasts = {}
        for task_id, pending in self._durations.pending(connection, task_ids).items():
            learned = self._durations.of(pending.kind)
            if learned is not None:
                forecasts[task_id] = self._forecast(pending, learned, defined, prices)
        return forecasts

    def outlooks(self, classes: Iterable[ResourceClass], capacity: Mapping[Key, int]) -> dict[str, PoolOutlook]:
        """Returns the expected wait for each class's pool, as far as known. `capacity`: slots of standing instances."""
        learned = self._durations.of_all()
        held_s, boot_s = learned.held_s.get(Mode.PERSISTENT), learned.start_s.get(Mode.EPHEMERAL, math.inf)
        outlooks_by_name = {}
        for one in classes:
            key = (Mode.PERSISTENT, one.name)
            slots = capacity.get(key, 0)
            release_s = held_s / slots if held_s is not None and slots else math.inf
            room = max(0, one.pool_max * one.pool_slots - slots)
            outlooks_by_name[one.name] = PoolOutlook(one.pool_slots, release_s, boot_s, one.pool_cooldown_s, room)
        return outlooks_by_name

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
        prices = {mode: self._price(provider, defined.name) for mode, provider in providers.items()}
        known = {mode: price for mode, price in prices.items() if price is not None}
        return known if len(known) == len(_MODES) else dict.fromkeys(_MODES, 1.0)
