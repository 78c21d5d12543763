"""Records which images each host has, and where persistent instances have room.

Images have the key that tasks use, a reference or the digest of a recipe: it is known before anything is pulled.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import Connection, text

from app.ledger.database import Database, sql
from app.models.spec import IMAGELESS, EnvironmentKind, EnvironmentSpec, Mode

GONE_S = 120.0
"""A host that has not reported for this long is forgotten, with its images."""
ALIVE_S = GONE_S / 4
"""Maximum seconds between a host's heartbeats."""

ImageKey = Callable[[EnvironmentSpec], str]
"""Function that returns the key of an environment's image on hosts."""


_REPORT = text("""
WITH gone AS (
    DELETE FROM host_images WHERE host = :host AND image <> ALL(CAST(:images AS text[]))
), come AS (
    INSERT INTO host_images (host, image) SELECT :host, image FROM unnest(CAST(:images AS text[])) AS image
    WHERE NOT EXISTS (SELECT 1 FROM host_images h WHERE h.host = :host AND h.image = image.image)
    ON CONFLICT DO NOTHING
)
INSERT INTO hosts (name) VALUES (:host) ON CONFLICT (name) DO UPDATE SET seen_at = clock_timestamp()
""")
_FORGET = text("""
WITH gone AS (
    DELETE FROM hosts WHERE seen_at < clock_timestamp() - make_interval(secs => :age) RETURNING name
)
DELETE FROM host_images h USING gone WHERE h.host = gone.name
""")


def report(database: Database, host: str, images: Collection[str]) -> None:
    """Records a host's images and heartbeat; only changes are written. Deletes hosts that are gone.

    Raises: DatabaseUnavailable.
    """
    with database.begin() as connection:
        connection.execute(_REPORT, {"host": host, "images": sorted(images)})
        connection.execute(_FORGET, {"age": GONE_S})


def stands_on(database: Database, instance_id: UUID, host: str) -> None:
    """Records the host of a standing instance before the instance is ready: tasks are placed on it only afterwards.

    Raises: DatabaseUnavailable.
    """
    database.sql(
        "UPDATE instances SET host = :host WHERE id = :id AND host IS DISTINCT FROM :host",
        {"id": instance_id, "host": host},
    )


def where(connection: Connection, images: Collection[str]) -> dict[str, set[str]]:
    """Returns the hosts that have each of these images; images on no host are left out."""
    hosts: defaultdict[str, set[str]] = defaultdict(set)
    rows = sql(
        connection,
        "SELECT image, host FROM host_images WHERE image = ANY(CAST(:images AS text[]))",
        {"images": list(images)},
    )
    for row in rows:
        hosts[row.image].add(row.host)
    return dict(hosts)


_FREE = text("""
WITH standing AS MATERIALIZED (
    SELECT id, host, slots FROM instances
    WHERE mode = 'persistent' AND resource_class = :class AND state = 'ready' AND host IS NOT NULL
), held AS (
    SELECT s.host FROM attempts a JOIN standing s ON s.id = a.instance_id
    WHERE a.mode = 'persistent' AND a.resource_class = :class AND a.state = 'running'
    UNION ALL
    SELECT queue_host FROM attempts
    WHERE mode = 'persistent' AND resource_class = :class AND state = 'dispatched' AND queue_host IS NOT NULL
)
SELECT host, sum(slots)::int - (SELECT count(*) FROM held WHERE held.host = standing.host)::int AS free
FROM standing GROUP BY host
""")


def free_slots(connection: Connection, resource_class: str) -> dict[str, int]:
    """Returns the free slots of a standing pool by host, without slots that a sent message will use; at least 0."""
    rows = connection.execute(_FREE, {"class": resource_class})
    return {row.host: max(0, row.free) for row in rows}


def standing(connection: Connection) -> dict[str, frozenset[str]]:
    """Returns the hosts with standing instances that take work, and the resource classes that each serves."""
    rows = sql(
        connection,
        "SELECT host, array_agg(DISTINCT resource_class) AS classes FROM instances"
        " WHERE mode = 'persistent' AND state = 'ready' AND host IS NOT NULL GROUP BY host",
    )
    return {row.host: frozenset(row.classes) for row in rows}


def any_host_will_do(connection: Connection) -> bool:
    """Whether only tasks for standing pools wait: these may be placed on any host that has their image."""
    others = text("SELECT 1 FROM tasks WHERE state = 'pending' AND in_line AND requested_mode = :mode LIMIT 1")
    modes = [mode for mode in Mode if mode is not Mode.PERSISTENT]
    return all(connection.execute(others, {"mode": mode.value}).first() is None for mode in modes)


# Only the environment leaves the server: the rest of a spec may be a large patch.
_ENVIRONMENTS = text(
    "SELECT digest, CAST(body AS json) -> 'task' -> 'environment' AS environment FROM specs"
    " WHERE digest = ANY(CAST(:digests AS text[]))"
)
_MOST_CACHED = 20_000


class EnvironmentCache:
    """Environments by the digest of their spec, which never changes. Threads may share it."""

    def __init__(self) -> None:
        self._cached: dict[str, EnvironmentSpec | None] = {}
        self._lock = threading.Lock()

    def load(self, connection: Connection, digests: Collection[str]) -> dict[str, EnvironmentSpec]:
        """Returns environments by spec digest, without those that need no image or come from a newer version."""
        with self._lock:
            if len(self._cached) > _MOST_CACHED:
                self._cached.clear()
            environments = {digest: self._cached[digest] for digest in digests if digest in self._cached}
        if unknown := [digest for digest in digests if digest not in environments]:
            rows = connection.execute(_ENVIRONMENTS, {"digests": unknown})
            environments |= {row.digest: _environment(row.environment) for row in rows}
            with self._lock:
                self._cached.update(environments)
        return {digest: environment for digest, environment in environments.items() if environment is not None}


def _environment(stored: object) -> EnvironmentSpec | None:
    try:
        environment = EnvironmentSpec.model_validate(stored)
    except ValidationError:
        return None
    return None if environment.kind in (*IMAGELESS, EnvironmentKind.KUBERNETES) else environment


def spec_digests(connection: Connection, task_ids: Sequence[UUID]) -> dict[UUID, str]:
    """Returns the digest of each of these tasks' specs."""
    statement = "SELECT id, spec_digest FROM tasks WHERE id = ANY(CAST(:ids AS uuid[]))"
    return {row.id: row.spec_digest for row in sql(connection, statement, {"ids": list(task_ids)})}


class ImagesOfTasks:
    """Reads which image each task needs. `key`: how hosts call an environment's image."""

    def __init__(self, key: ImageKey) -> None:
        self._key = key
        self._environments = EnvironmentCache()

    def of(self, connection: Connection, task_ids: Sequence[UUID]) -> Mapping[UUID, str]:
        """Returns the image of each task; empty: it needs none, or a newer version wrote its spec."""
        digests = spec_digests(connection, task_ids)
        environments = self._environments.load(connection, set(digests.values()))
        images = {digest: self._key(environment) for digest, environment in environments.items()}
        return {task_id: images.get(digest, "") for task_id, digest in digests.items()}


# Every host sweeps its own resources, and an instance's host records that the instance was swept. If that host is
# unknown or no longer reports, the host of the control plane's leader records it.


class EndedInstance(NamedTuple):
    """An ended instance that was not swept yet. `ours`: this host must record when it was swept."""

    id: UUID
    ours: bool


_UNSWEPT = text("""
WITH others AS MATERIALIZED (
    SELECT name FROM hosts WHERE name <> :host AND seen_at > clock_timestamp() - make_interval(secs => :gone)
), ended AS (
    SELECT id, ended_at, coalesce(host, CASE WHEN provider = 'static' THEN split_part(handle, ':', 1) END) AS stood
    FROM instances WHERE swept_at IS NULL AND state IN ('terminated', 'failed')
)
SELECT id, :control OR stood IS NOT DISTINCT FROM :host AS ours FROM ended
WHERE stood IS NULL OR stood NOT IN (SELECT name FROM others) ORDER BY ended_at LIMIT 5000
""")


def unswept(database: Database, host: str, *, control: bool) -> list[EndedInstance]:
    """Returns ended instances that may have left resources on `host`, oldest end first. control: the leader is there.

    Raises: DatabaseUnavailable.
    """
    rows = database.sql(_UNSWEPT, {"host": host, "control": control, "gone": GONE_S})
    return [EndedInstance(row.id, row.ours) for row in rows]


def clock_ahead_s(database: Database) -> float:
    """Returns the seconds by which the ledger's clock (used for attempts' deadlines) is ahead of this host's clock.

    Raises: DatabaseUnavailable.
    """
    with database.begin() as connection:  # read this host's clock before the commit, which takes time, too
        now = sql(connection, "SELECT extract(epoch FROM clock_timestamp())::float8").scalar_one()
        return float(now) - time.time()


def swept(database: Database, instance_ids: Sequence[UUID]) -> None:
    """Records that no resources of these instances are left; the first record stays. Raises: DatabaseUnavailable."""
    if not instance_ids:
        return
    database.sql(
        "UPDATE instances SET swept_at = clock_timestamp() WHERE id = ANY(:ids) AND swept_at IS NULL",
        {"ids": list(instance_ids)},
    )
