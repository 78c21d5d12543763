"""Counts which limits an attempt hit, from the kernel's counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from app.environments.contract import Environment
from app.errors import HostOutOfMemory
from app.models.spec import Resources


@dataclass
class LimitAccount:
    """Limits hit by one attempt. `limits` apply to each environment; next kills and refusals count for `stage`.

    Other containers of an environment, such as services of a compose file, are counted by name with their own limit.
    """

    limits: Resources
    stage: str = "agent"
    _killed: _LimitTally = field(default_factory=lambda: _LimitTally())
    _refused: _LimitTally = field(default_factory=lambda: _LimitTally())
    _host_killed: _LimitTally = field(default_factory=lambda: _LimitTally())
    _throttled: _LimitTally = field(default_factory=lambda: _LimitTally())  # seconds
    _services: dict[str, _LimitTally] = field(default_factory=dict)  # kills per service
    _several: list[_Services] = field(default_factory=list)
    _service_limits: dict[str, int] = field(default_factory=dict)  # bytes

    @classmethod
    def resumed(cls, limits: Resources, counted: Mapping[str, Any]) -> LimitAccount:
        """Continues the account of another worker. counted: the result of its last `look`."""
        account = cls(limits)
        memory = counted.get("memory", {})
        account._killed.resume(memory.get("killed"))
        account._refused.resume(counted.get("processes", {}).get("refused"))
        account._throttled.resume(counted.get("cpu", {}).get("throttled_s"))
        for name, beside in memory.get("services", {}).items():
            account._service_limits[name] = beside["limit_bytes"]
            account._services[name] = _LimitTally()
            account._services[name].resume(beside["killed"])
        return account

    def watch(self, environment: Environment) -> None:
        """Counts in the environment from now on; earlier counts do not belong to this attempt."""
        self._killed.watch(environment, environment.memory_kills)
        self._refused.watch(environment, environment.processes_refused)
        self._host_killed.watch(environment, environment.host_kills)
        self._throttled.watch(environment, environment.throttled_s)
        several = _Services(environment)
        if several.found:
            self._several.append(several)
            for name, memory in several.found.items():
                self._service_limits.setdefault(name, memory.limit_bytes)
                self._services.setdefault(name, _LimitTally()).watch(environment, partial(several.kills, name))

    def leave(self, environment: object) -> None:
        """Stops counting in a released environment: later counts belong to another attempt."""
        for several in self._several:
            several.look()
        for tally in (*self._own, *self._services.values()):
            tally.leave(environment, self.stage)
        self._several = [one for one in self._several if one.environment is not environment]

    @property
    def _own(self) -> tuple[_LimitTally, ...]:
        return self._killed, self._refused, self._host_killed, self._throttled

    def refuse_host_kills(self) -> None:
        """Raises: HostOutOfMemory: a process was killed although the task's own limit was not reached."""
        counts = self._host_killed.look(self.stage) or {}
        if kills := round(sum(counts.values())):
            raise HostOutOfMemory(
                f"the host was short of memory: {kills} killed in the environment, which never met its own limit of"
                f" {self.limits.most.memory_bytes} bytes; it is done again"
            )

    def look(self) -> dict[str, Any]:
        """Returns the counts so far by `memory`, `processes` and `cpu`; leaves out what this host cannot count."""
        for several in self._several:
            several.look()
        killed, refused, by_host, throttled = (tally.look(self.stage) for tally in self._own)
        beside = {name: tally.look(self.stage) or {} for name, tally in self._services.items()}
        result: dict[str, Any] = {}
        if killed is not None:
            result["memory"] = {"limit_bytes": self.limits.most.memory_bytes, "killed": killed}
            if by_host and any(by_host.values()):
                result["memory"]["killed_by_host"] = by_host
            services = {
                name: {"limit_bytes": self._service_limits[name], "killed": counts}
                for name, counts in beside.items()
                if any(counts.values())
            }
            if services:
                result["memory"]["services"] = services
        if refused is not None:
            result["processes"] = {"limit": self.limits.pids, "refused": refused}
        if throttled is not None:
            seconds = {stage: round(count, 3) for stage, count in throttled.items()}
            result["cpu"] = {"limit": self.limits.most.cpus, "throttled_s": seconds}
        return result


@dataclass
class _LimitTally:
    _watched: list[_Watched] = field(default_factory=list)
    _left: float = 0
    _seen: bool = False
    _by_stage: dict[str, float] = field(default_factory=dict)

    def resume(self, by_stage: dict[str, float] | None) -> None:
        if by_stage is not None:
            self._by_stage, self._left, self._seen = dict(by_stage), sum(by_stage.values()), True

    def watch(self, environment: object, count: Callable[[], float | None]) -> None:
        if (before := count()) is not None:
            self._watched.append(_Watched(environment, count, before))
            self._seen = True

    def leave(self, environment: object, stage: str) -> None:
        self.look(stage)
        for one in [one for one in self._watched if one.environment is environment]:
            self._watched.remove(one)
            self._left += one.known

    def look(self, stage: str) -> dict[str, float] | None:
        """Adds the new count to `stage`; returns the counts by stage. None: not counted."""
        if not self._seen:
            return None
        since = self._left + sum(one.since() for one in self._watched) - sum(self._by_stage.values())
        self._by_stage[stage] = self._by_stage.get(stage, 0) + since
        return dict(self._by_stage)


@dataclass
class _Watched:
    environment: object
    count: Callable[[], float | None]
    before: float
    known: float = 0

    def since(self) -> float:
        """Returns the count since watching began; the last known count once the counter cannot be read."""
        count = self.count()
        self.known = max(self.known, 0 if count is None else count - self.before)
        return self.known


class _Services:
    """Counters of an environment's services, read from all services at once."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.look()

    def look(self) -> None:
        self.found = self.environment.memory_beside()

    def kills(self, name: str) -> int | None:
        """Returns the service's kills at the last look."""
        return None if (one := self.found.get(name)) is None else one.kills
