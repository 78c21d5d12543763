"""Which environments the queue will need, soonest first: what hosts pull ahead, and what they evict last.

A forecast and not a promise: the dispatcher's order between lines, without its limits on slots and quotas.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import Connection, text

from app.ledger import pauses, quotas, waiting
from app.ledger.database import Database
from app.ledger.waiting import QueueKey, WaitingTask
from app.models.spec import IMAGELESS, EnvironmentSpec

MOST = 2000
"""Tasks that are looked at: a line further back may yet change its order."""
_REMEMBERED = 20_000
_LEAST = 16
"""Heads of each line, unless there are more lines than tasks to look at."""


@dataclass(frozen=True, slots=True)
class Need:
    """One environment that tasks need. `position` 0: an attempt has it or is about to; 1: the next task in line."""

    environment: EnvironmentSpec
    position: int
    tasks: int  # that were looked at and need it
    user_name: str  # whose task needs it first


@dataclass(frozen=True, slots=True)
class _QueuedSpec:
    """A task's place in the order."""

    spec_digest: str
    user_name: str
    position: int


class Upcoming:
    """Reads the queue; remembers environments by the digest of their spec, which never changes. Threads may share it.

    fair: whether users take turns by what they hold; else first come first served.
    """

    def __init__(self, database: Database, *, fair: bool = True) -> None:
        self._database = database
        self._fair = fair
        self._known: dict[str, EnvironmentSpec | None] = {}
        self._lock = threading.Lock()

    def needs(self, most: int = MOST) -> list[Need]:
        """Each image's environment once, each project's of several containers too, soonest first; none without images.

        Raises: DatabaseUnavailable.
        """
        found: dict[tuple[str | None, ...], Need] = {}
        for turn, environment in self._turns(most):
            image = _image(environment)
            first = found.get(image) or Need(environment, turn.position, 0, turn.user_name)
            found[image] = Need(first.environment, first.position, first.tasks + 1, first.user_name)
        return list(found.values())

    def _turns(self, most: int) -> list[tuple[_QueuedSpec, EnvironmentSpec]]:
        """Without those that need no image."""
        with self._database.begin() as connection:
            turns = [*_under_way(connection, most), *self._in_line(connection, most)]
            self._learn(connection, {turn.spec_digest for turn in turns})
        pairs = [(turn, self._known.get(turn.spec_digest)) for turn in turns]
        return [(turn, environment) for turn, environment in pairs if environment is not None]

    def _in_line(self, connection: Connection, most: int) -> list[_QueuedSpec]:
        paused = pauses.paused(connection)
        keys = [
            key
            for key in waiting.queues(connection)
            if key.user_name not in paused.users and key.resource_class not in paused.classes
        ]
        least = _LEAST if len(keys) <= most else 1
        take = min(most, max(least, most // max(1, len(keys))))
        heads = waiting.heads(connection, [(key, take) for key in keys])
        seen, book = waiting.occupancy(connection), quotas.load(connection)
        held: Counter[tuple[str, str]] = Counter()
        for (user, (_, resource_class)), count in seen.by_user.items():
            held[user, resource_class] += count
        weights = {key.user_name: book.of(key.user_name).weight for key in keys}
        ordered = list(in_order(heads, held, weights, fair=self._fair))[:most]
        found = _specs(connection, [task_id for task_id, _ in ordered])
        return [
            _QueuedSpec(found[task_id], user, place)
            for place, (task_id, user) in enumerate(ordered, start=1)
            if task_id in found
        ]

    def _learn(self, connection: Connection, digests: set[str]) -> None:
        with self._lock:
            if len(self._known) > _REMEMBERED:
                self._known.clear()
            unknown = [digest for digest in digests if digest not in self._known]
        if unknown:
            rows = connection.execute(_ENVIRONMENTS, {"digests": unknown})
            learnt = {row.digest: _environment(row.environment) for row in rows}
            with self._lock:
                self._known.update(learnt)


def in_order(
    heads: Mapping[QueueKey, Sequence[WaitingTask]],
    held: Mapping[tuple[str, str], int],
    weights: Mapping[str, float],
    *,
    fair: bool,
) -> Iterator[tuple[UUID, str]]:
    """Tasks and their users as they would go if slots came one by one: priority, fair share, arrival.

    held: live attempts of a user in a class.
    """
    shares = Counter(held)

    def rank(key: QueueKey, place: int) -> tuple[int, float, UUID]:
        candidate = heads[key][place]
        share = shares[key.user_name, key.resource_class] / weights[key.user_name] if fair else 0.0
        return -candidate.priority, share, candidate.run_id

    heap = [(rank(key, 0), key, 0) for key, found in heads.items() if found]
    heapq.heapify(heap)
    while heap:
        then, key, place = heapq.heappop(heap)
        now = rank(key, place)
        if now > then:  # another line of this user went meanwhile
            heapq.heappush(heap, (now, key, place))
            continue
        yield heads[key][place].task_id, key.user_name
        shares[key.user_name, key.resource_class] += 1
        if place + 1 < len(heads[key]):
            heapq.heappush(heap, (rank(key, place + 1), key, place + 1))


_UNDER_WAY = text("""
SELECT t.spec_digest, t.user_name FROM (
    SELECT id, task_id FROM attempts WHERE state IN ('dispatched', 'running') ORDER BY id LIMIT :most
) a JOIN tasks t ON t.id = a.task_id ORDER BY a.id
""")


def _under_way(connection: Connection, most: int) -> list[_QueuedSpec]:
    """The longest under way first."""
    return [_QueuedSpec(row.spec_digest, row.user_name, 0) for row in connection.execute(_UNDER_WAY, {"most": most})]


def _specs(connection: Connection, task_ids: Sequence[UUID]) -> dict[UUID, str]:
    """The digest of each of these tasks' specs."""
    rows = connection.execute(
        text("SELECT id, spec_digest FROM tasks WHERE id = ANY(CAST(:ids AS uuid[]))"), {"ids": list(task_ids)}
    )
    return {row.id: row.spec_digest for row in rows}


# Only so much leaves the server: the rest of a spec may be a large patch.
_ENVIRONMENTS = text(
    "SELECT digest, CAST(body AS json) -> 'task' -> 'environment' AS environment FROM specs"
    " WHERE digest = ANY(CAST(:digests AS text[]))"
)


def _environment(told: Any) -> EnvironmentSpec | None:
    """None: it needs no image, or a newer version of ours wrote it."""
    try:
        found = EnvironmentSpec.model_validate(told)
    except ValidationError:
        return None
    return None if found.kind in IMAGELESS else found


def _image(environment: EnvironmentSpec) -> tuple[str | None, ...]:
    build, compose = environment.build, environment.compose
    if compose is not None:
        return (None, compose.context.sha256, compose.file, compose.service)
    return (environment.image,) if build is None else (None, build.context.sha256, build.dockerfile)
