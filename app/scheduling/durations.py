"""Learns recent durations of tasks, by dataset, agent and image, for the choice of their mode."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row

from app.ledger.database import sql
from app.models.spec import Mode

_REFRESH_S = 30.0
_NEWEST, _KEPT_DIGESTS = 1_000, 20_000


class TaskKind(NamedTuple):
    """Key of tasks with similar durations. `image` is empty for images built from a recipe."""

    dataset: str
    agent: str
    image: str


class PendingTask(NamedTuple):
    """A waiting task: its kind, and the deadline of its run."""

    kind: TaskKind
    deadline_at: datetime | None


@dataclass(frozen=True, slots=True)
class Learned:
    """Mean seconds of the newest attempts, by mode: from claim to end (held), and from admission to claim (start)."""

    held_s: Mapping[Mode, float] = field(default_factory=dict)
    start_s: Mapping[Mode, float] = field(default_factory=dict)


_KIND = (
    "s.body::json->'task'->>'dataset' AS dataset, s.body::json->>'agent' AS agent,"
    " coalesce(s.body::json#>>'{task,environment,image}', '') AS image"
)
_FINISHED = """
SELECT t.spec_digest, a.mode, extract(epoch FROM a.finished_at - a.claimed_at)::float8 AS held_s,
    extract(epoch FROM a.claimed_at - a.dispatched_at)::float8 AS start_s
FROM (SELECT * FROM attempts ORDER BY id DESC LIMIT 5 * :newest) a JOIN tasks t ON t.id = a.task_id
WHERE a.state = 'finished' AND a.claimed_at IS NOT NULL ORDER BY a.id DESC LIMIT :newest
"""


class Durations:
    """Cache of a dispatcher for durations; refreshed on use, at most every 30 seconds."""

    def __init__(self) -> None:
        self._read_at = -_REFRESH_S
        self._kinds: dict[str, TaskKind] = {}
        self._learned: dict[tuple[str, ...], Learned] = {}

    def pending(self, connection: Connection, task_ids: Sequence[UUID]) -> dict[UUID, PendingTask]:
        """Returns the kinds and deadlines of these tasks."""
        rows = sql(
            connection,
            "SELECT t.id, t.spec_digest, r.deadline_at FROM tasks t JOIN runs r ON r.id = t.run_id"
            " WHERE t.id = ANY(CAST(:ids AS uuid[]))",
            {"ids": list(task_ids)},
        ).all()
        kinds = self._kinds_of(connection, {row.spec_digest for row in rows})
        return {row.id: PendingTask(kinds[row.spec_digest], row.deadline_at) for row in rows}

    def refresh(self, connection: Connection) -> None:
        """Reads the recently ended attempts, at most every 30 seconds."""
        if time.monotonic() - self._read_at < _REFRESH_S:
            return
        self._read_at = time.monotonic()
        rows = sql(connection, _FINISHED, {"newest": _NEWEST}).all()
        kinds = self._kinds_of(connection, {row.spec_digest for row in rows})
        groups: defaultdict[tuple[str, ...], list[Row[Any]]] = defaultdict(list)
        for row in rows:
            kind = kinds[row.spec_digest]
            for alike in (kind, kind[:2], kind[1:2], ()):
                groups[alike].append(row)
        self._learned = {alike: _means(held) for alike, held in groups.items()}

    def of(self, kind: TaskKind) -> Learned | None:
        """Returns the durations of that kind; else of its dataset and agent; else of its agent. None: unknown."""
        known = (self._learned.get(alike) for alike in (kind, kind[:2], kind[1:2]))
        return next((one for one in known if one is not None), None)

    def of_all(self) -> Learned:
        """Returns the durations of all recently ended attempts."""
        return self._learned.get((), Learned())

    def _kinds_of(self, connection: Connection, digests: set[str]) -> Mapping[str, TaskKind]:
        unknown = digests - self._kinds.keys()
        if unknown:
            if len(self._kinds) > _KEPT_DIGESTS:
                self._kinds.clear()
                unknown = digests
            rows = sql(
                connection,
                f"SELECT s.digest, {_KIND} FROM specs s WHERE s.digest = ANY(:digests)",  # noqa: S608 (constant text)
                {"digests": list(unknown)},
            )
            self._kinds |= {row.digest: TaskKind(row.dataset, row.agent, row.image) for row in rows}
        return self._kinds


def _means(rows: Sequence[Row[Any]]) -> Learned:
    by_mode: defaultdict[Mode, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        by_mode[Mode(row.mode)].append(row)
    return Learned(
        {mode: fmean(row.held_s for row in held) for mode, held in by_mode.items()},
        {mode: fmean(row.start_s for row in held) for mode, held in by_mode.items()},
    )
