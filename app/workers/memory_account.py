"""Whom the kernel killed for an environment's memory limit during an attempt: told apart from crashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.environments.base import Environment, MemoryCounting


@dataclass
class MemoryAccount:
    """Of one attempt. `limit_bytes` holds for each of its environments; `stage`: whose the next kills are."""

    limit_bytes: int
    stage: str = "agent"
    _watched: list[_Watched] = field(default_factory=list)
    _left: int = 0
    _seen: bool = False
    _killed: dict[str, int] = field(default_factory=dict)

    def watch(self, environment: Environment) -> None:
        """From now on; what was killed in it before is not this attempt's."""
        if isinstance(environment, MemoryCounting) and (before := environment.memory_kills()) is not None:
            self._watched.append(_Watched(environment, before))
            self._seen = True

    def leave(self, environment: object) -> None:
        """It is given back: what is killed in it from now on is somebody else's."""
        self.look()
        for one in [one for one in self._watched if one.environment is environment]:
            self._watched.remove(one)
            self._left += one.known

    def look(self) -> dict[str, Any]:
        """The account, with what was killed since the last look; nothing, where nobody shows it."""
        if not self._seen:
            return {}
        since = self._left + sum(one.killed() for one in self._watched) - sum(self._killed.values())
        self._killed[self.stage] = self._killed.get(self.stage, 0) + since
        return {"memory": {"limit_bytes": self.limit_bytes, "killed": dict(self._killed)}}


@dataclass
class _Watched:
    environment: MemoryCounting
    before: int
    known: int = 0

    def killed(self) -> int:
        """Since it is watched; the last that was known, once it cannot be asked."""
        count = self.environment.memory_kills()
        self.known = max(self.known, 0 if count is None else count - self.before)
        return self.known
