"""Lists the environments that the queue will need, soonest first, for prefetching and eviction.

The list is a forecast: the dispatcher's order between queues, without its limits on slots and quotas.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from uuid import UUID

from sqlalchemy import Connection, text

from app.ledger import quotas, waiting
from app.ledger.database import Database
from app.ledger.host_images import EnvironmentCache, spec_digests
from app.ledger.waiting import QueueKey, WaitingTask
from app.models.spec import EnvironmentSpec

MOST = 2000
"""Number of tasks that are read: the order of those further back may still change."""
_LEAST = 16
"""Tasks read of each queue, unless there are more queues than tasks to read."""


class Upcoming:
    """Reads the environments of waiting and running tasks. Threads may share it.

    fair: users take turns by their use (fair share); else first come first served.
    """

    def __init__(self, database: Database, *, fair: bool = True) -> None:
        self._database = database
        self._fair = fair
        self._environments = EnvironmentCache()

    def needs(self, most: int = MOST) -> list[EnvironmentSpec]:
        """Returns each environment with an image or a compose project once, soonest first; none without images.

        Raises: DatabaseUnavailable.
        """
        with self._database.begin() as connection:
            digests = [*_under_way(connection, most), *self._in_line(connection, most)]
            environments = self._environments.load(connection, set(digests))
        by_image: dict[tuple[str | None, ...], EnvironmentSpec] = {}
        for environment in (environments[digest] for digest in digests if digest in environments):
            by_image.setdefault(_image(environment), environment)
        return list(by_image.values())

    def _in_line(self, connection: Connection, most: int) -> list[str]:
        """Returns the digests of the waiting tasks' specs."""
        keys = waiting.queues(connection)
        least = _LEAST if len(keys) <= most else 1
        take = min(most, max(least, most // max(1, len(keys))))
        heads = waiting.heads(connection, [(key, take) for key in keys])
        seen, book = waiting.occupancy(connection), quotas.load(connection)
        held: Counter[tuple[str, str]] = Counter()
        for (user, (_, resource_class)), count in seen.by_user.items():
            held[user, resource_class] += count
        weights = {key.user_name: book.of(key.user_name).weight for key in keys}
        ordered = list(in_order(heads, held, weights, fair=self._fair))[:most]
        digests = spec_digests(connection, ordered)
        return [digests[task_id] for task_id in ordered if task_id in digests]


def in_order(
    heads: Mapping[QueueKey, Sequence[WaitingTask]],
    held: Mapping[tuple[str, str], int],
    weights: Mapping[str, float],
    *,
    fair: bool,
) -> Iterator[UUID]:
    """Yields tasks in the order for slots that free up one by one: priority, fair share, arrival.

    held: live attempts of a user in a class.
    """
    shares = Counter(held)

    def rank(key: QueueKey, place: int) -> tuple[int, float, UUID]:
        candidate = heads[key][place]
        share = shares[key.user_name, key.resource_class] / weights[key.user_name] if fair else 0.0
        return -candidate.priority, share, candidate.run_id

    heap = [(rank(key, 0), key, 0) for key, tasks in heads.items() if tasks]
    heapq.heapify(heap)
    while heap:
        then, key, place = heapq.heappop(heap)
        now = rank(key, place)
        if now > then:  # this user's share grew by another queue meanwhile
            heapq.heappush(heap, (now, key, place))
            continue
        yield heads[key][place].task_id
        shares[key.user_name, key.resource_class] += 1
        if place + 1 < len(heads[key]):
            heapq.heappush(heap, (rank(key, place + 1), key, place + 1))


_UNDER_WAY = text("""
SELECT t.spec_digest FROM (
    SELECT id, task_id FROM attempts WHERE state IN ('dispatched', 'running', 'grading') ORDER BY id LIMIT :most
) a JOIN tasks t ON t.id = a.task_id ORDER BY a.id
""")


def _under_way(connection: Connection, most: int) -> list[str]:
    """Returns the digests of specs with a live attempt, the longest running first."""
    return list(connection.execute(_UNDER_WAY, {"most": most}).scalars())


def _image(environment: EnvironmentSpec) -> tuple[str | None, ...]:
    build, compose = environment.build, environment.compose
    if compose is not None:
        return (None, compose.context.sha256, compose.file, compose.service)
    return (environment.image,) if build is None else (None, build.context.sha256, build.dockerfile)
