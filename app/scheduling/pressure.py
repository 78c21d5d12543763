"""Limits attempts at once per host and model by reported pressure; in the memory of the deciding dispatcher."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Connection

from app.ledger import pressure
from app.ledger.pressure import EngineLoad, HostLoad
from app.models.spec import Mode
from app.scheduling import policy
from app.scheduling.policy import Key

_LOOK_S = 0.5
_SETTLE_S = 10.0
"""Time after a window shrank in which reports still reflect the earlier load."""
_REPORT_S = 2.0
"""Interval of gateways' reports: in between, nothing new is known about a model."""


@dataclass(slots=True)
class _Window:
    size: float
    shrunk_at: float = -math.inf  # monotonic seconds

    def report(self, live: int, pressed: float, least: int = 1) -> None:
        if pressed >= 1 and time.monotonic() - self.shrunk_at < _SETTLE_S:
            return
        size = policy.next_window(self.size, live, pressed, least)
        if size < self.size:
            self.shrunk_at = time.monotonic()
        self.size = size


@dataclass(slots=True)
class Withheld:
    """Capacity taken away by pressure: slots by host and class, room by model (without an entry: no limit)."""

    slots: Counter[tuple[str, str]] = field(default_factory=Counter)
    rooms: dict[str, int] = field(default_factory=dict)

    @property
    def full(self) -> list[str]:
        return sorted(model for model, room in self.rooms.items() if room <= 0)

    def of_class(self, resource_class: str) -> int:
        return sum(count for (_, name), count in self.slots.items() if name == resource_class)

    def less(self, capacity: dict[Key, int]) -> dict[Key, int]:
        """Returns the capacity without the withheld slots."""
        return {
            (mode, name): max(0, slots - self.of_class(name)) if mode is Mode.PERSISTENT else slots
            for (mode, name), slots in capacity.items()
        }


class Windows:
    """Windows of hosts and models. cpu_most: share of time in which a process may wait for a CPU; 0: ignore hosts."""

    def __init__(self, cpu_most: float) -> None:
        self._cpu_most = cpu_most
        self.forget()

    def forget(self) -> None:
        """Clears all windows: another dispatcher has decided in the meantime."""
        self._hosts: dict[str, _Window] = {}
        self._reported: dict[str, datetime] = {}
        self._models: dict[str, _Window] = {}
        self._models_at = self._looked_at = -math.inf
        self._slots = Counter[tuple[str, str]]()

    def look(self, connection: Connection) -> Withheld:
        """Returns what is withheld now. Reads reports at most twice a second."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            if self._cpu_most:
                self._slots = self._look_at_hosts(pressure.hosts(connection))
            if now - self._models_at >= _REPORT_S:
                self._models_at = now
                self._look_at_models(connection, pressure.engines(connection))
        if not self._models:
            return Withheld(self._slots)
        live = pressure.live_of_models(connection, self._models)
        return Withheld(self._slots, {name: int(one.size) - live[name] for name, one in self._models.items()})

    def _look_at_hosts(self, loads: Sequence[HostLoad]) -> Counter[tuple[str, str]]:
        """Returns the slots to withhold, by host and class."""
        by_host: defaultdict[str, list[HostLoad]] = defaultdict(list)
        for load in loads:
            by_host[load.host].append(load)
        self._hosts = {host: window for host, window in self._hosts.items() if host in by_host}
        withheld = Counter[tuple[str, str]]()
        for host, here in by_host.items():
            running = sum(load.running for load in here)
            report, at = here[0].pressure, here[0].at
            window = self._hosts.setdefault(host, _Window(max(running, policy.first_window(report.cores))))
            if self._reported.get(host) != at:
                self._reported[host] = at
                pressed = policy.host_pressure(report.cpu, report.memory_available, self._cpu_most)
                short = report.memory_available < policy.MEMORY_LEAST
                window.report(running, pressed, 1 if short else policy.first_window(report.cores))
            for load in here:
                room = max(0, int(window.size) - (running - load.running))
                if room < load.slots:
                    withheld[host, load.resource_class] = load.slots - room
        return withheld

    def _look_at_models(self, connection: Connection, engines: Sequence[EngineLoad]) -> None:
        pressed = by_model(engines)
        self._models = {model: window for model, window in self._models.items() if model in pressed}
        bounded = [model for model, value in pressed.items() if value >= 1 or model in self._models]
        live = pressure.live_of_models(connection, bounded) if bounded else Counter[str]()
        for model in bounded:
            self._models.setdefault(model, _Window(math.inf)).report(live[model], pressed[model])


def by_model(engines: Sequence[EngineLoad]) -> dict[str, float]:
    """Returns the pressure of each model: that of its inference server with the lowest load."""
    pressures: dict[str, float] = {}
    for one in engines:
        full = policy.engine_pressure(
            inside=one.inside, waiting=one.waiting, queued=one.queued, refused=one.refused, kv_use=one.kv_use
        )
        for model in one.models:
            pressures[model] = min(full, pressures.get(model, math.inf))
    return pressures
