"""What a standing worker keeps: environments that were used, reset and proven clean, ready for the next task."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import structlog

from app.environments.base import Environment, EnvironmentProvider, Origin, ResetProof, Tags
from app.errors import StationError
from app.models.spec import EnvironmentKind, EnvironmentSpec, Network, Resources

log = structlog.get_logger()

MAX_AGE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Key:
    """What two tasks must share so that one may get the other's environment."""

    kind: EnvironmentKind
    image_id: str
    resources: Resources
    network: Network
    workdir: str
    env: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, spec: EnvironmentSpec, image_id: str) -> Key:
        return cls(spec.kind, image_id, spec.resources, spec.network, spec.workdir, frozenset(spec.env.items()))


@dataclass(slots=True)
class Holding:
    """An environment, what it fits, and when it was made (monotonic)."""

    environment: Environment
    key: Key
    made: float
    resettable: bool


class EnvironmentPool:
    """The environments of one worker, lent and idle. Safe to share between threads.

    A recycled container keeps the labels of the attempt that it was made for, but gets a name for its new one.
    """

    def __init__(self, *, max_idle: int, max_age_s: float = MAX_AGE_S) -> None:
        self._max_idle = max_idle
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._idle: deque[Holding] = deque()  # least recently used first
        self._lent: dict[str, Holding] = {}
        self._closed = False

    def acquire(
        self,
        provider: EnvironmentProvider,
        spec: EnvironmentSpec,
        tags: Tags,
        image_id: str,
        *,
        timeout_s: float,
        allow_reuse: bool,
    ) -> tuple[Environment, Origin]:
        """A fitting clean environment, else a new one. It stays ours: give it back with `release`.

        Raises: whatever the provider's `create` does.
        """
        self._discard(self._outdated())
        key = Key.of(spec, image_id)
        while allow_reuse and not spec.setup and (holding := self._take(key)) is not None:
            if _answers(holding.environment, tags):
                self._lend(holding)
                return holding.environment, Origin.RECYCLED
            self._discard([holding])
        environment = provider.create(spec, tags, timeout_s=timeout_s)
        self._lend(Holding(environment, key, time.monotonic(), resettable=not spec.setup))
        return environment, Origin.FRESH

    def release(self, environment: Environment, *, reuse: bool) -> ResetProof | None:
        """Take it back: reset and keep it when `reuse` and proven clean, else destroy it. None: no reset was tried."""
        with self._lock:
            holding = self._lent.pop(environment.id, None)
        wanted = reuse and holding is not None and holding.resettable and self._max_idle > 0 and not self._closed
        proof = environment.reset() if wanted else None
        if holding is None or proof is None or not proof.clean:
            if proof is not None:
                log.info("environment.not_recycled", environment=environment.id, left=list(proof.left))
            environment.destroy()
            return proof
        self._discard(self._keep(holding))
        return proof

    def idle_ids(self) -> list[str]:
        """Environments that wait for a task: a sweeper must keep them."""
        with self._lock:
            return [holding.environment.id for holding in self._idle]

    def close(self) -> None:
        """Destroy all, lent ones too: the worker is leaving."""
        with self._lock:
            self._closed = True
            leaving = [*self._idle, *self._lent.values()]
            self._idle.clear()
            self._lent.clear()
        self._discard(leaving)

    def _lend(self, holding: Holding) -> None:
        with self._lock:
            self._lent[holding.environment.id] = holding

    def _take(self, key: Key) -> Holding | None:
        with self._lock:
            for holding in reversed(self._idle):
                if holding.key == key:
                    self._idle.remove(holding)
                    return holding
        return None

    def _keep(self, holding: Holding) -> list[Holding]:
        """Put it among the idle ones; who must go for it, which may be itself."""
        with self._lock:
            if self._closed:
                return [holding]
            self._idle.append(holding)
            return [self._idle.popleft() for _ in range(len(self._idle) - self._max_idle)]

    def _outdated(self) -> list[Holding]:
        oldest = time.monotonic() - self._max_age_s
        with self._lock:
            outdated = [holding for holding in self._idle if holding.made < oldest]
            for holding in outdated:
                self._idle.remove(holding)
        return outdated

    def _discard(self, holdings: list[Holding]) -> None:
        for holding in holdings:
            try:
                holding.environment.destroy()
            except StationError as error:  # the sweeper finds it by its label
                log.warning("environment.destroy_failed", environment=holding.environment.id, reason=str(error))


@runtime_checkable
class Adoptable(Protocol):
    """An environment that shows outside whose it is."""

    def adopt(self, tags: Tags) -> None: ...


def _answers(environment: Environment, tags: Tags) -> bool:
    """Give an idle environment its new owner; False when it lives no more: somebody may have removed it meanwhile."""
    try:
        if isinstance(environment, Adoptable):
            environment.adopt(tags)
        environment.stats()
    except StationError:
        return False
    return True
