"""Resource classes: kinds of instances, each with queues and capacity of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from sqlalchemy import Connection, Row, text

from app.errors import LimitInvalid, OptionInvalid, SpecInvalid
from app.ledger import events
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.resources import Resources
from app.models.spec import Mode, TaskSpec
from app.models.wire import Wire, checked
from app.settings import ProviderName, Settings

STANDARD = "standard"
"""Class that always exists; values that it leaves open come from the settings."""

Architecture = Literal["amd64", "arm64"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")  # it becomes part of a queue's name


@dataclass(frozen=True, slots=True)
class ResourceClass:
    """A resource class with all values resolved. One instance has `cpus`, `memory_bytes` and `gpus`."""

    name: str
    cpus: float | None  # None: not bounded
    memory_bytes: int | None
    gpus: int
    architecture: Architecture | None  # None: any
    ephemeral_capacity: int  # instances at once
    ephemeral_provider: ProviderName
    persistent_provider: ProviderName
    pool_min: int  # standing instances
    pool_max: int
    pool_slots: int  # attempts at once on one of them
    pool_cooldown_s: float  # idle this long before the pool shrinks

    def could_run(self, mode: Mode) -> bool:
        """Whether MegaFlow can create instances for tasks of this mode."""
        options = {Mode.EPHEMERAL: self.ephemeral_capacity > 0, Mode.PERSISTENT: self.pool_max > 0}
        return any(options.values()) if mode is Mode.AUTO else options[mode]

    def has_place_for(self, mode: Mode, size: Resources) -> bool:
        """Whether the guaranteed resources fit into one place: an instance, or a slot's share of a standing one."""
        cpus, memory_bytes = self._place(mode)
        return (cpus is None or size.cpus <= cpus) and (memory_bytes is None or size.memory_bytes <= memory_bytes)

    def place_label(self, mode: Mode) -> str:
        cpus, memory_bytes = self._place(mode)
        sizes = [f"{cpus:g} processors"] if cpus is not None else []
        return ", ".join([*sizes, f"{memory_bytes >> 20} MiB"] if memory_bytes is not None else sizes)

    def _place(self, mode: Mode) -> tuple[float | None, int | None]:
        shared = mode is Mode.PERSISTENT or (mode is Mode.AUTO and self.pool_max > 0)
        slots = self.pool_slots if shared else 1
        return (
            None if self.cpus is None else self.cpus / slots,
            None if self.memory_bytes is None else self.memory_bytes // slots,
        )


def load(connection: Connection, settings: Settings) -> dict[str, ResourceClass]:
    """Returns every class by its name; `standard` is always among them."""
    rows = sql(connection, "SELECT * FROM resource_classes ORDER BY name")
    return {row.name: _resolved(row, settings) for row in rows}


def _resolved(row: Row[Any], settings: Settings) -> ResourceClass:
    standard = row.name == STANDARD
    pool = settings.persistent_instances if standard else 0
    # A configured pool_min or pool_max also moves the other's default, so that the minimum never exceeds the maximum.
    pool_min = _or(row.pool_min, pool if row.pool_max is None else min(pool, row.pool_max))
    return ResourceClass(
        name=row.name,
        cpus=row.cpus,
        memory_bytes=row.memory_bytes,
        gpus=row.gpus,
        architecture=row.architecture,
        ephemeral_capacity=_or(row.ephemeral_capacity, settings.capacity() if standard else 0),
        ephemeral_provider=row.ephemeral_provider or settings.ephemeral_provider,
        persistent_provider=row.persistent_provider or settings.persistent_provider,
        pool_min=pool_min,
        pool_max=_or(row.pool_max, max(pool, pool_min)),
        pool_slots=_or(row.pool_slots, settings.persistent_slots),
        pool_cooldown_s=settings.pool_cooldown_s if row.pool_cooldown_s is None else row.pool_cooldown_s,
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def check(connection: Connection, settings: Settings, pairs: Iterable[tuple[Mode, str]]) -> None:
    """Checks that tasks of these modes and classes can run; keeps the classes from removal until the transaction ends.

    Raises: SpecInvalid: an unknown class, or one without capacity for the requested mode.
    """
    requested = set(pairs)
    custom = sorted({name for _, name in requested if name != STANDARD})
    if custom:  # `standard` cannot be removed: no lock, which all submissions would share
        sql(
            connection,
            "SELECT 1 FROM resource_classes WHERE name = ANY(:names) ORDER BY name FOR KEY SHARE",
            {"names": custom},
        )
    defined = load(connection, settings)
    for mode, name in sorted(requested):
        if name not in defined:
            raise OptionInvalid(
                f"expected a resource class among {', '.join(defined)}, found {name!r};"
                f" try `megaflow classes set {name} …` to define it; nothing was accepted"
            )
        if not defined[name].could_run(mode) and not (mode is not Mode.EPHEMERAL and _has_own_pool(connection, name)):
            raise SpecInvalid(
                f"expected resource class {name!r} to have capacity for mode {mode.value}, found none;"
                f" try `megaflow classes set {name} {_OPTION[mode]}`; nothing was accepted"
            )


_OPTION = {
    Mode.EPHEMERAL: "--ephemeral N",
    Mode.PERSISTENT: "--pool-max N",
    Mode.AUTO: "--ephemeral N` or `--pool-max N",
}


def check_sizes(connection: Connection, settings: Settings, specs: Iterable[TaskSpec]) -> None:
    """Refuses tasks whose guaranteed resources exceed a place of their class, where the class has a size.

    Admission counts places, so the guaranteed resources of all running tasks fit into the instances.

    Raises: SpecInvalid: names the task and the classes that are large enough.
    """
    defined = load(connection, settings)
    for spec in specs:
        size, own = spec.task.environment.resources, defined[spec.resource_class]
        if own.has_place_for(spec.mode, size):
            continue
        fitting = [
            name for name, one in defined.items() if one.could_run(spec.mode) and one.has_place_for(spec.mode, size)
        ]
        ways = " or ".join(f"--class {name}" for name in fitting) or f"`megaflow classes set {own.name} --memory …`"
        raise SpecInvalid(
            f"task {spec.task.name}: expected at most what a place of resource class {own.name!r} has"
            f" ({own.place_label(spec.mode)}), found {size.cpus:g} processors and {size.memory_bytes >> 20} MiB"
            f" guaranteed; try {ways}; nothing was accepted"
        )


def _has_own_pool(connection: Connection, name: str) -> bool:
    """Whether standing instances of the class were started by hand (`megaflow worker persistent`)."""
    statement = text(
        "SELECT 1 FROM instances WHERE mode = 'persistent' AND resource_class = :name"
        " AND (provider = 'static' OR state NOT IN ('terminated', 'failed')) LIMIT 1"
    )
    return connection.execute(statement, {"name": name}).first() is not None


_MOST = 1_000_000


class ClassChanges(Wire):
    """Properties of a class that can be set; None restores the default."""

    cpus: float | None = Field(default=None, ge=0.01, le=_MOST)
    memory_bytes: int | None = Field(default=None, ge=1 << 20, lt=2**63)
    gpus: int | None = Field(default=None, ge=0, le=_MOST)
    architecture: Architecture | None = None
    ephemeral_capacity: int | None = Field(default=None, ge=0, le=_MOST)
    ephemeral_provider: ProviderName | None = None
    persistent_provider: ProviderName | None = None
    pool_min: int | None = Field(default=None, ge=0, le=_MOST)
    pool_max: int | None = Field(default=None, ge=0, le=_MOST)
    pool_slots: int | None = Field(default=None, ge=1, le=_MOST)
    pool_cooldown_s: float | None = Field(default=None, ge=0, le=_MOST)


def set_class(database: Database, name: str, **changes: Any) -> None:
    """Defines a class, or changes one; properties not given stay unchanged, None restores the default.

    Raises: LimitInvalid: nothing was changed.
    """
    if not _NAME.fullmatch(name):
        raise LimitInvalid(
            f"expected a class name of lower-case letters, digits, '-' and '_', at most 41, found {name!r}"
        )
    values = checked(ClassChanges, changes, f"class {name!r}").model_dump(exclude_unset=True)
    if "gpus" in values:
        values["gpus"] = values["gpus"] or 0
    with database.begin() as connection:
        sql(connection, "INSERT INTO resource_classes (name) VALUES (:name) ON CONFLICT DO NOTHING", {"name": name})
        if values:
            columns = ", ".join(f"{column} = :{column}" for column in values)  # names from `ClassChanges`
            statement = f"UPDATE resource_classes SET {columns} WHERE name = :name"  # noqa: S608
            sql(connection, statement, {**values, "name": name})
        row = sql(connection, "SELECT * FROM resource_classes WHERE name = :name", {"name": name}).one()
        if row.pool_min is not None and row.pool_max is not None and row.pool_min > row.pool_max:
            raise LimitInvalid(
                f"class {name!r}: expected pool_min <= pool_max, found {row.pool_min} > {row.pool_max};"
                f" set both at once; nothing was changed"
            )
        events.append(connection, Fact("class.set", data={"class": name, **values}))
        events.wake_dispatcher(connection)


def remove_class(database: Database, name: str) -> None:
    """Removes a class that has no unfinished tasks and no live instances.

    Raises: LimitInvalid: there is no such class, it is `standard`, or tasks or instances of it are left.
    """
    if name == STANDARD:
        raise LimitInvalid(
            "class 'standard' is what tasks get that ask for none and cannot be removed;"
            " try `megaflow classes set standard --ephemeral 0 --pool-max 0` to offer nothing"
        )
    with database.begin() as connection:
        row = connection.execute(_DELETE, {"name": name}).first()
        if row is None:
            known = ", ".join(sql(connection, "SELECT name FROM resource_classes ORDER BY name").scalars())
            raise LimitInvalid(f"unknown resource class {name!r}; known: {known}")
        left = connection.execute(_LEFT, {"name": name}).one()
        if left.tasks or left.instances:
            raise LimitInvalid(
                f"expected nothing of class {name!r} to be left, found {left.tasks} task(s) that have not ended and"
                f" {left.instances} live instance(s); try `megaflow cancel` and `megaflow drain INSTANCE`,"
                f" then again; nothing was changed"
            )
        events.append(connection, Fact("class.removed", data={"class": name}))
        events.wake_dispatcher(connection)


# Deletes first, and rolls back if something is left: it waits for submissions that have just checked the class.
_DELETE = text("DELETE FROM resource_classes WHERE name = :name RETURNING name")
_LEFT = text(
    "SELECT (SELECT count(*) FROM tasks WHERE resource_class = :name"
    " AND state IN ('pending', 'admitted', 'running')) AS tasks,"
    " (SELECT count(*) FROM instances WHERE resource_class = :name"
    " AND state NOT IN ('terminated', 'failed')) AS instances"
)
