"""Whom the kernel killed for an environment's memory limit during an attempt: told apart from crashes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from app.environments.base import Environment, MemoryCounting, ServicesCounting


@dataclass
class MemoryAccount:
    """Of one attempt. `limit_bytes` holds for each of its environments; `stage`: whose the next kills are.

    What runs beside such an environment, as services of a compose file do, is told by its name with a limit of its own.
    """

    limit_bytes: int
    stage: str = "agent"
    _watched: list[_Watched] = field(default_factory=list)
    _own: _Tally | None = None  # None: nobody shows it
    _services: dict[str, _Tally] = field(default_factory=dict)

    def watch(self, environment: Environment) -> None:
        """From now on; what was killed in it before is not this attempt's."""
        if isinstance(environment, MemoryCounting) and (before := environment.memory_kills()) is not None:
            self._own = self._own or _Tally(self.limit_bytes)
            self._watched.append(_Watched(environment, self._own, environment.memory_kills, before))
        if isinstance(environment, ServicesCounting):
            for name, found in environment.memory_beside().items():
                tally = self._services.setdefault(name, _Tally(found.limit_bytes))
                self._watched.append(_Watched(environment, tally, partial(_kills, environment, name), found.kills))

    def leave(self, environment: object) -> None:
        """It is given back: what is killed in it from now on is somebody else's."""
        self.look()
        for one in [one for one in self._watched if one.environment is environment]:
            self._watched.remove(one)
            one.tally.left += one.known

    def look(self) -> dict[str, Any]:
        """The account, with what was killed since the last look; nothing, where nobody shows it."""
        for tally in (*([self._own] if self._own else []), *self._services.values()):
            tally.note(sum(one.killed() for one in self._watched if one.tally is tally), self.stage)
        if self._own is None:
            return {}
        killed = {name: tally.told() for name, tally in self._services.items() if any(tally.killed.values())}
        return {"memory": {**self._own.told(), **({"services": killed} if killed else {})}}


@dataclass
class _Tally:
    """What was killed for one limit."""

    limit_bytes: int
    left: int = 0  # in environments that were given back
    killed: dict[str, int] = field(default_factory=dict)  # by stage

    def note(self, living: int, stage: str) -> None:
        """living: killed in environments that are watched, by now."""
        since = self.left + living - sum(self.killed.values())
        self.killed[stage] = self.killed.get(stage, 0) + since

    def told(self) -> dict[str, Any]:
        return {"limit_bytes": self.limit_bytes, "killed": dict(self.killed)}


@dataclass
class _Watched:
    environment: object
    tally: _Tally
    count: Callable[[], int | None]
    before: int
    known: int = 0

    def killed(self) -> int:
        """Since it is watched; the last that was known, once it cannot be asked."""
        count = self.count()
        self.known = max(self.known, 0 if count is None else count - self.before)
        return self.known


def _kills(environment: ServicesCounting, service: str) -> int | None:
    found = environment.memory_beside().get(service)
    return None if found is None else found.kills
