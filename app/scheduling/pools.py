"""Computes how many instances each persistent pool should have."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Mapping

import structlog
from sqlalchemy import Connection

from app.ledger import pressure
from app.ledger.classes import ResourceClass
from app.ledger.waiting import Occupancy, QueueKey
from app.models.instance import InstanceMode
from app.models.spec import Mode
from app.scheduling import policy
from app.scheduling.policy import UserShare

log = structlog.get_logger()

PoolKey = tuple[InstanceMode, str]
"""Kind of instance (standing or grader), and resource class."""


def elastic(resource_class: ResourceClass) -> bool:
    """Whether its pool follows the backlog."""
    return resource_class.pool_min != resource_class.pool_max


def target(
    resource_class: ResourceClass, seen: Occupancy, backlogs: Mapping[QueueKey, int], standings: Mapping[str, UserShare]
) -> int:
    """Returns the number of instances that the class's pool should have now. `backlogs`: of the queues it may serve."""
    if not elastic(resource_class):
        return resource_class.pool_max
    key = (Mode.PERSISTENT, resource_class.name)
    waiting = [
        (queue.user_name, count)
        for queue, count in backlogs.items()
        if queue.resource_class == resource_class.name and queue.mode is not Mode.EPHEMERAL
    ]
    return policy.pool_target(
        held=seen.live[key] - seen.draining[key],
        waiting=policy.servable(waiting, standings),
        slots=resource_class.pool_slots,
        at_least=resource_class.pool_min,
        at_most=resource_class.pool_max,
    )


def graders(name: str, seen: Occupancy, *, slots: int, most: int) -> int:
    """Returns the graders that a class should have now: at least one once a running attempt will need it."""
    expected = int(name in seen.graded_apart)
    return policy.pool_target(
        held=seen.unfinished_gradings[name], waiting=0, slots=slots, at_least=expected, at_most=most
    )


class Surplus:
    """Continuous surplus of each pool, with its start; in the memory of the deciding dispatcher."""

    def __init__(self) -> None:
        self._least: dict[PoolKey, tuple[float, int]] = {}  # start in monotonic seconds, minimum surplus since then

    def note(self, name: PoolKey, surplus: int) -> None:
        """Records that a pool now has `surplus` more instances than it needs."""
        if surplus <= 0:
            self._least.pop(name, None)
            return
        since, least = self._least.get(name, (time.monotonic(), surplus))
        self._least[name] = (since, min(least, surplus))

    def due(self, name: PoolKey, cooldown_s: float) -> int:
        """Returns the number of instances not needed for `cooldown_s`; then restarts the count."""
        since, least = self._least.get(name, (0.0, 0))
        if not least or time.monotonic() - since < cooldown_s:
            return 0
        del self._least[name]
        return least

    def forget(self) -> None:
        """Clears the record: another dispatcher has decided in the meantime."""
        self._least.clear()


class FailingPools:
    """Pools that tasks of mode `auto` avoid, because most attempts there failed within `rest_s`.

    A pool is used again when its last faults are older than that. Checked once a second.
    """

    _LOOK_S = 1.0

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._found = frozenset[str]()
        self._looked_at = -math.inf

    def look(self, connection: Connection, defined: Collection[ResourceClass]) -> frozenset[str]:
        """Returns the classes with failing pools; a class without ephemeral instances is not avoided."""
        if time.monotonic() - self._looked_at >= self._LOOK_S:
            self._looked_at = time.monotonic()
            both = [one.name for one in defined if one.ephemeral_capacity]
            failing = (
                pressure.failing_pools(connection, both, self._rest_s) if self._rest_s and both else frozenset[str]()
            )
            if failing != self._found:
                log.warning("dispatcher.failing_pools", classes=sorted(failing))
            self._found = failing
        return self._found


class Rests:
    """Providers that are not called for some time after a failure: longer with each consecutive failure."""

    _FIRST_S = 0.5
    _LONGEST_S = 30.0

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}  # monotonic seconds

    def resting(self, provider: str) -> bool:
        return self._until.get(provider, 0.0) > time.monotonic()

    def worked(self, provider: str) -> None:
        self._failures.pop(provider, None)
        self._until.pop(provider, None)

    def failed(self, provider: str, *, wholly: bool) -> None:
        """Records that it started nothing (`wholly`) or only a part. Two failures in one look count once."""
        if self.resting(provider):
            return
        failures = self._failures.get(provider, 0) + 1 if wholly else 1
        self._failures[provider] = failures
        rest_s = min(self._LONGEST_S, self._FIRST_S * 2.0 ** min(30, failures - 1))
        self._until[provider] = time.monotonic() + rest_s * (0.75 + random.random() / 4)
