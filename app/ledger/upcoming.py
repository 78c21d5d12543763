"""Which environments the queue will need, soonest first: what hosts pull ahead, and what they evict last.

A forecast and not a promise: the dispatcher's order between lines, without its limits on slots and quotas.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import Connection, Row, text

from app.ledger import pauses, quotas, waiting
from app.ledger.database import Database
from app.ledger.waiting import Candidate, Key, LineKey
from app.models.spec import IMAGELESS, EnvironmentSpec, Limits, Mode, Reuse

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
class NextOne:
    """One environment that one task will need, and has not got yet. `position` as for `Need`."""

    environment: EnvironmentSpec
    position: int
    timeout_s: float  # that the task allows for its making
    line: Key  # the mode that the task asked for, or has, and its class
    host: str | None = None  # where the task is, or was sent; None: not known


@dataclass(frozen=True, slots=True)
class _Turn:
    """A task's place in the order."""

    spec_digest: str
    user_name: str
    position: int
    line: Key
    run_id: UUID | None = None
    host: str | None = None
    asked: bool = False  # for one that is ready, which it does once: it has one now, or makes its own
    served: bool = False  # the agent has its environment
    graded_next: bool = False  # the agent is at work: what follows is the grading


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a spec wants of its host; `again`: a second environment of the same kind, for the grading."""

    environment: EnvironmentSpec
    timeout_s: float
    again: bool


class Upcoming:
    """Reads the queue; remembers environments by the digest of their spec, which never changes. Threads may share it.

    fair: whether users take turns by what they hold; else first come first served.
    """

    def __init__(self, database: Database, *, fair: bool = True) -> None:
        self._database = database
        self._fair = fair
        self._known: dict[str, _Wanted | None] = {}
        self._lock = threading.Lock()

    def needs(self, most: int = MOST) -> list[Need]:
        """Each image's environment once, each project's of several containers too, soonest first; none without images.

        Raises: DatabaseUnavailable.
        """
        found: dict[tuple[str | None, ...], Need] = {}
        for turn, wanted in self._turns(most):
            environment = wanted.environment
            image = _image(environment)
            first = found.get(image) or Need(environment, turn.position, 0, turn.user_name)
            found[image] = Need(first.environment, first.position, first.tasks + 1, first.user_name)
        return list(found.values())

    def one_by_one(self, most: int = MOST, *, of: Collection[Key] | None = None) -> list[NextOne]:
        """Every environment that is still to be made, soonest first: an entry for each, replicas too.

        of: for the tasks of these modes and classes alone; None: for all.

        A task that is graded in an environment of its own needs that one, too, once its agent has ended: nobody knows
        when, and so it is taken to come as soon as the task in the same place of the line. Of one that is shared by
        the tasks of a run there is a single entry.

        Raises: DatabaseUnavailable.
        """
        found, gradings = [], 0
        shared: set[tuple[str, UUID | None]] = set()
        for turn, wanted in self._turns(most, of):
            environment, position = wanted.environment, turn.position
            if turn.asked and not turn.served:
                continue
            if not turn.served and wanted.environment.reuse is Reuse.SHARED_READONLY:
                if (turn.spec_digest, turn.run_id) in shared:
                    continue
                shared.add((turn.spec_digest, turn.run_id))
            if turn.served:
                if not (turn.graded_next and wanted.again):
                    continue
                gradings += 1
                environment, position = environment.for_grading(), gradings
            found.append(NextOne(environment, position, wanted.timeout_s, turn.line, turn.host))
        return sorted(found, key=lambda one: one.position)

    def _turns(self, most: int, of: Collection[Key] | None = None) -> list[tuple[_Turn, _Wanted]]:
        """Without those that need no image."""
        with self._database.begin() as connection:
            turns = [*_under_way(connection, most, of), *self._in_line(connection, most, of)]
            self._learn(connection, {turn.spec_digest for turn in turns})
        pairs = [(turn, self._known.get(turn.spec_digest)) for turn in turns]
        return [(turn, wanted) for turn, wanted in pairs if wanted is not None]

    def _in_line(self, connection: Connection, most: int, of: Collection[Key] | None) -> list[_Turn]:
        paused = pauses.paused(connection)
        keys = [
            key
            for key in waiting.lines(connection)
            if key.user_name not in paused.users
            and key.resource_class not in paused.classes
            and (of is None or (key.mode, key.resource_class) in of)
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
        lines = {one.task_id: (key.mode, key.resource_class) for key, line in heads.items() for one in line}
        return [
            _Turn(found[task_id].spec_digest, user, place, lines[task_id], found[task_id].run_id)
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
            learnt = {row.digest: _wanted(row) for row in rows}
            with self._lock:
                self._known.update(learnt)


def in_order(
    heads: Mapping[LineKey, Sequence[Candidate]],
    held: Mapping[tuple[str, str], int],
    weights: Mapping[str, float],
    *,
    fair: bool,
) -> Iterator[tuple[UUID, str]]:
    """Tasks and their users as they would go if slots came one by one: priority, fair share, arrival.

    held: live attempts of a user in a class.
    """
    shares = Counter(held)

    def rank(key: LineKey, place: int) -> tuple[int, float, UUID]:
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
SELECT t.spec_digest, t.user_name, t.run_id, a.mode, a.resource_class, coalesce(i.host, a.hint_host) AS host,
    jsonb_exists(a.phases, 'image_ready') AS asked, jsonb_exists(a.phases, 'environment_ready') AS served,
    jsonb_exists(a.phases, 'agent_ended') AS past_agent
FROM (
    SELECT id, task_id, instance_id, mode, resource_class, hint_host, phases FROM attempts
    WHERE state IN ('dispatched', 'running') AND (:all OR (mode, resource_class) IN (
        SELECT * FROM unnest(CAST(:modes AS text[]), CAST(:classes AS text[]))))
    ORDER BY id LIMIT :most
) a JOIN tasks t ON t.id = a.task_id LEFT JOIN instances i ON i.id = a.instance_id ORDER BY a.id
""")


def _under_way(connection: Connection, most: int, of: Collection[Key] | None) -> list[_Turn]:
    """The longest under way first."""
    lines = list(of or ())
    values = {"all": of is None, "modes": [mode.value for mode, _ in lines], "classes": [name for _, name in lines]}
    return [
        _Turn(
            row.spec_digest,
            row.user_name,
            0,
            (Mode(row.mode), row.resource_class),
            row.run_id,
            row.host,
            asked=row.asked,
            served=row.served,
            graded_next=row.served and not row.past_agent,
        )
        for row in connection.execute(_UNDER_WAY, {"most": most, **values})
    ]


def _specs(connection: Connection, task_ids: Sequence[UUID]) -> dict[UUID, Row[Any]]:
    """Of each of these tasks: `spec_digest`, `run_id`."""
    rows = connection.execute(
        text("SELECT id, run_id, spec_digest FROM tasks WHERE id = ANY(CAST(:ids AS uuid[]))"), {"ids": list(task_ids)}
    )
    return {row.id: row for row in rows}


# Only so much leaves the server: the rest of a spec may be a large patch.
_ENVIRONMENTS = text(
    "SELECT digest, task -> 'environment' AS environment, task -> 'goal' ->> 'kind' AS goal,"
    " CAST(task -> 'limits' ->> 'environment_timeout_s' AS float) AS timeout_s"
    " FROM (SELECT digest, CAST(body AS json) -> 'task' AS task FROM specs"
    " WHERE digest = ANY(CAST(:digests AS text[]))) AS found"
)


def _wanted(row: Row[Any]) -> _Wanted | None:
    """None: it needs no image, or a newer version of ours wrote it."""
    try:
        found = EnvironmentSpec.model_validate(row.environment)
    except ValidationError:
        return None
    if found.kind in IMAGELESS:
        return None
    timeout_s = Limits().environment_timeout_s if row.timeout_s is None else row.timeout_s
    return _Wanted(found, timeout_s, again=row.goal == "tests")


def _image(environment: EnvironmentSpec) -> tuple[str | None, ...]:
    build, compose = environment.build, environment.compose
    if compose is not None:
        return (None, compose.context.sha256, compose.file, compose.service)
    return (environment.image,) if build is None else (None, build.context.sha256, build.dockerfile)
