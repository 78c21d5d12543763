"""Finds which limits an attempt hit, from the kernel's counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from app.environments.contract import Environment
from app.models.spec import Resources


@dataclass
class LimitAccount:
    """Of one attempt. `limits` hold for each of its environments; `stage`: whose the next kills and refusals are.

    What runs beside such an environment, as services of a compose file do, is told by its name with a limit of its own.
    """

    limits: Resources
    stage: str = "agent"
    _killed: _LimitTally = field(default_factory=lambda: _LimitTally())
    _refused: _LimitTally = field(default_factory=lambda: _LimitTally())
    _services: dict[str, _LimitTally] = field(default_factory=dict)  # killed there
    _several: list[_Services] = field(default_factory=list)
    _service_limits: dict[str, int] = field(default_factory=dict)  # bytes

    @classmethod
    def resumed(cls, limits: Resources, counted: Mapping[str, Any]) -> LimitAccount:
        """Goes on where another worker's has ended. counted: what its `look` has found."""
        account = cls(limits)
        memory = counted.get("memory", {})
        account._killed.resume(memory.get("killed"))
        account._refused.resume(counted.get("processes", {}).get("refused"))
        for name, beside in memory.get("services", {}).items():
            account._service_limits[name] = beside["limit_bytes"]
            account._services[name] = _LimitTally()
            account._services[name].resume(beside["killed"])
        return account

    def watch(self, environment: Environment) -> None:
        """From now on; what was counted in it before is not this attempt's."""
        self._killed.watch(environment, environment.memory_kills)
        self._refused.watch(environment, environment.processes_refused)
        several = _Services(environment)
        if several.found:
            self._several.append(several)
            for name, found in several.found.items():
                self._service_limits.setdefault(name, found.limit_bytes)
                self._services.setdefault(name, _LimitTally()).watch(environment, partial(several.kills, name))

    def leave(self, environment: object) -> None:
        """It is given back: what is counted in it from now on is another attempt's."""
        for several in self._several:
            several.look()
        for tally in (self._killed, self._refused, *self._services.values()):
            tally.leave(environment, self.stage)
        self._several = [one for one in self._several if one.environment is not environment]

    def look(self) -> dict[str, Any]:
        """`memory` and `processes`, with what was counted since the last look; nothing of what is not counted here."""
        for several in self._several:
            several.look()
        killed, refused = self._killed.look(self.stage), self._refused.look(self.stage)
        beside = {name: tally.look(self.stage) or {} for name, tally in self._services.items()}
        found: dict[str, Any] = {}
        if killed is not None:
            found["memory"] = {"limit_bytes": self.limits.memory_bytes, "killed": killed}
            services = {
                name: {"limit_bytes": self._service_limits[name], "killed": counts}
                for name, counts in beside.items()
                if any(counts.values())
            }
            if services:
                found["memory"]["services"] = services
        if refused is not None:
            found["processes"] = {"limit": self.limits.pids, "refused": refused}
        return found


@dataclass
class _LimitTally:
    """How often one of the limits was met."""

    _watched: list[_Watched] = field(default_factory=list)
    _left: int = 0
    _seen: bool = False
    _by_stage: dict[str, int] = field(default_factory=dict)

    def resume(self, by_stage: dict[str, int] | None) -> None:
        if by_stage is not None:
            self._by_stage, self._left, self._seen = dict(by_stage), sum(by_stage.values()), True

    def watch(self, environment: object, count: Callable[[], int | None]) -> None:
        if (before := count()) is not None:
            self._watched.append(_Watched(environment, count, before))
            self._seen = True

    def leave(self, environment: object, stage: str) -> None:
        self.look(stage)
        for one in [one for one in self._watched if one.environment is environment]:
            self._watched.remove(one)
            self._left += one.known

    def look(self, stage: str) -> dict[str, int] | None:
        """By stage, what is new as that one's; None where it is not counted."""
        if not self._seen:
            return None
        since = self._left + sum(one.since() for one in self._watched) - sum(self._by_stage.values())
        self._by_stage[stage] = self._by_stage.get(stage, 0) + since
        return dict(self._by_stage)


@dataclass
class _Watched:
    environment: object
    count: Callable[[], int | None]
    before: int
    known: int = 0

    def since(self) -> int:
        """Since it is watched; the last that was known, once it cannot be asked."""
        count = self.count()
        self.known = max(self.known, 0 if count is None else count - self.before)
        return self.known


class _Services:
    """What the services of an environment have counted, asked of all of them at once."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.look()

    def look(self) -> None:
        self.found = self.environment.memory_beside()

    def kills(self, name: str) -> int | None:
        """As of the last look."""
        return None if (one := self.found.get(name)) is None else one.kills
