"""Defines named limits: set values, defaults, and current use.

A name is `KIND:SUBJECT`; the subject `*` means all subjects without a row of their own. Slots of classes and
quotas of users are limits, too, but are stored in their own tables (`classes`, `quotas`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from app.errors import LimitInvalid
from app.ledger import classes, events
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.instance import InstanceMode, queue_of
from app.models.kinds import LIMIT_KINDS as KINDS
from app.models.spec import Mode
from app.settings import Settings

HOLDS = "megaflow_holds"
"""Channel: the payload names a limit whose places became free or were granted, or whose capacity changed."""

EVERY = "*"
"""Subject of the limit that applies to all subjects without their own."""

_ELSEWHERE = {
    "slots:grading": "MEGAFLOW_GRADING_INSTANCES=N MEGAFLOW_GRADING_SLOTS=N",
    "slots": "megaflow classes set CLASS --ephemeral N | --slots N",
    "pool": "megaflow classes set CLASS --pool-max N",
    "class": "megaflow classes set CLASS …",
    "quota": "megaflow quota set USER …",
    "pause": "megaflow resume RUN",
}
_MOST = 1_000_000_000_000


def kind_of(name: str) -> tuple[str, str]:
    """Returns the kind and the subject of a limit that can be set.

    Raises: LimitInvalid: there is no such kind, or the subject is missing.
    """
    for kind in KINDS:
        if name.startswith(f"{kind}:") and len(name) > len(kind) + 1:
            return kind, name[len(kind) + 1 :]
    known = ", ".join(f"{kind}:NAME" for kind in KINDS)
    better = _ELSEWHERE.get(name.partition(".")[0]) or _ELSEWHERE.get(name.partition(":")[0])
    advice = f"; this one is set by `{better}`" if better else f"; known: {known} (NAME may be `*`)"
    raise LimitInvalid(f"unknown limit {name!r}{advice}; nothing was changed")


def defaults_of(settings: Settings) -> dict[str, int]:
    """Returns the limits that apply where none was set, by kind; other kinds have no bound then."""
    return {
        "environment_starts": settings.environment_starts,
        "image_builds": settings.image_builds,
        "image_pulls": settings.image_pulls,
    }


def everybody(name: str) -> str:
    """Returns the limit that applies when `name` has no row: `image_pulls:*` for `image_pulls:ghcr.io`."""
    for kind in KINDS:
        if name.startswith(f"{kind}:"):
            return f"{kind}:{EVERY}"
    return name.partition(":")[0] + f":{EVERY}"


def set_limit(database: Database, name: str, capacity: float) -> None:
    """Sets a limit, in force at once: holders keep their places, new ones wait until use is below it. 0 grants none.

    Raises: LimitInvalid: nothing was changed.
    """
    kind, _ = kind_of(name)
    number = isinstance(capacity, int | float) and not isinstance(capacity, bool) and math.isfinite(capacity)
    if not number or not 0 <= capacity <= _MOST or capacity != int(capacity):
        raise LimitInvalid(
            f"limit {name!r} ({KINDS[kind]}): expected a whole number of 0 or more, found {capacity!r};"
            " nothing was changed"
        )
    with database.begin() as connection:
        sql(
            connection,
            "INSERT INTO limits (name, capacity) VALUES (:name, :capacity)"
            " ON CONFLICT (name) DO UPDATE SET capacity = excluded.capacity, set_at = clock_timestamp()",
            {"name": name, "capacity": capacity},
        )
        _changed(connection, name, Fact("limit.set", data={"limit": name, "capacity": int(capacity)}))


def clear_limit(database: Database, name: str) -> None:
    """Resets a limit to its default. Raises: LimitInvalid: it was not set."""
    kind_of(name)
    with database.begin() as connection:
        deleted = sql(connection, "DELETE FROM limits WHERE name = :name RETURNING name", {"name": name}).first()
        if deleted is None:
            known = ", ".join(sql(connection, "SELECT name FROM limits ORDER BY name").scalars())
            raise LimitInvalid(f"limit {name!r} has not been set; these have: {known or 'none yet'}")
        _changed(connection, name, Fact("limit.cleared", data={"limit": name}))


def _changed(connection: Connection, name: str, fact: Fact) -> None:
    events.append(connection, fact)
    events.wake_dispatcher(connection)
    wake_waiters(connection, [name])


def wake_waiters(connection: Connection, names: Sequence[str]) -> None:
    """Wakes the waiters of these limits when this transaction commits."""
    if names:
        sql(
            connection,
            "SELECT pg_notify(:channel, name) FROM unnest(CAST(:names AS text[])) AS name",
            {"channel": HOLDS, "names": list(names)},
        )


def capacities(connection: Connection, prefix: str) -> dict[str, int]:
    """Returns the capacities that were set, for limits whose name begins with `prefix`."""
    rows = sql(connection, "SELECT name, capacity FROM limits WHERE starts_with(name, :prefix)", {"prefix": prefix})
    return {row.name: int(row.capacity) for row in rows}


@dataclass(frozen=True, slots=True)
class Use:
    """Current use of one limit."""

    name: str
    used: int | None  # by live holders; None: unknown here
    waiting: int | None  # requests in line, or tasks that could take such a slot
    capacity: int | None  # None: no bound
    source: str  # set | default | class


def show(database: Database, settings: Settings) -> list[Use]:
    """Returns every limit that is set, held, or waited for, and the slots of every class; by name."""
    with database.begin() as connection:
        return uses(connection, settings)


def uses(connection: Connection, settings: Settings) -> list[Use]:
    """Returns the same as `show`, within a transaction."""
    return sorted([*_semaphores(connection, settings), *_slots(connection, settings)], key=lambda use: use.name)


def _semaphores(connection: Connection, settings: Settings) -> Iterator[Use]:
    defaults = defaults_of(settings)
    own = capacities(connection, "")
    held = {row.limit_name: row for row in connection.execute(_HELD)}
    for name in own.keys() | held.keys():
        row = held.get(name)
        applies = own.get(name, own.get(everybody(name), defaults.get(name.partition(":")[0])))
        counted = row is not None or not (name.startswith("model_") or name.endswith(f":{EVERY}"))
        yield Use(
            name,
            used=(row.used if row else 0) if counted else None,
            waiting=(row.waiting if row else 0) if counted else None,
            capacity=applies,
            source="set" if name in own or everybody(name) in own else "default",
        )


_HELD = text(
    "SELECT limit_name, count(granted_at) AS used, count(*) - count(granted_at) AS waiting"
    " FROM semaphore_holders WHERE expires_at > clock_timestamp() GROUP BY 1"
)


def _slots(connection: Connection, settings: Settings) -> Iterator[Use]:
    live = {(row.mode, row.resource_class): row.used for row in connection.execute(_LIVE)}
    waiting = {(row.requested_mode, row.resource_class): row.waiting for row in connection.execute(_WAITING)}
    pools = {(row.mode, row.resource_class): row.slots for row in connection.execute(_POOLS)}
    gradings = {row.resource_class: row for row in connection.execute(_GRADINGS)}
    for name, resource_class in classes.load(connection, settings).items():
        for mode in (Mode.EPHEMERAL, Mode.PERSISTENT):
            yield Use(
                f"slots:{queue_of(mode, name)}",
                used=live.get((mode, name), 0),
                waiting=waiting.get((mode.value, name), 0) + waiting.get((Mode.AUTO.value, name), 0),
                capacity=resource_class.ephemeral_capacity if mode is Mode.EPHEMERAL else pools.get((mode, name), 0),
                source="class",
            )
        if row := gradings.get(name):
            yield Use(
                f"slots:{queue_of(InstanceMode.GRADING, name)}",
                used=row.used,
                waiting=row.waiting,
                capacity=max(pools.get((InstanceMode.GRADING, name), 0), settings.grading_capacity()),
                source="settings",
            )


_LIVE = text(
    "SELECT mode, resource_class, count(*) AS used FROM attempts WHERE state IN ('dispatched', 'running') GROUP BY 1, 2"
)
_WAITING = text(
    "SELECT requested_mode, resource_class, count(*) AS waiting FROM tasks WHERE state = 'pending' AND in_line"
    " GROUP BY 1, 2"
)
_POOLS = text(
    "SELECT mode, resource_class, sum(slots)::int AS slots FROM instances"
    " WHERE mode <> 'ephemeral' AND state = 'ready' GROUP BY 1, 2"
)
_GRADINGS = text(
    "SELECT resource_class, count(instance_id) AS used, count(*) - count(instance_id) AS waiting FROM gradings"
    " GROUP BY 1"
)
