"""Resolves names of runs and tasks as users write them: an id, part of it, a name, `RUN/TASK`, `latest`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection

from app.errors import AmbiguousName, UnknownName, did_you_mean
from app.ledger.database import Database, sql

LATEST = "latest"
_LONGEST, _MOST_SLASHES = 1000, 20
"""Characters and slashes allowed in a name: each slash costs a query."""
_ID_PART = re.compile(r"[0-9a-f]{4,32}")
_OF_USER = "(CAST(:user AS text) IS NULL OR o.user_name = :user)"


def find(database: Database, kind: str, name: str, *, user_name: str | None = None) -> UUID:
    """Returns the run or task (`kind`: runs | tasks) that `name` means; only among one user's when one is given.

    A run: `latest`, a name (the newest run with it), an id or its beginning or end. A task: the same, and `RUN/TASK`;
    a name means the task of the newest run that has one; `NAME#2` is its replica 2.

    Raises: UnknownName; AmbiguousName: more than one id fits.
    """
    if len(name) > _LONGEST or name.count("/") > _MOST_SLASHES:
        raise UnknownName(
            f"expected a name of at most {_LONGEST} characters and {_MOST_SLASHES} slashes, found another"
        )
    with database.begin() as connection:
        lookup = NameLookup(connection, user_name)
        target = lookup.run(name) if kind == "runs" else lookup.task(name)
        others = lookup.task_or_none if kind == "runs" else lookup.run_or_none
        is_other = target is None and others(name) is not None
    if is_other and kind == "runs":
        raise UnknownName(f"{name!r} is a task, expected a run; `megaflow show {name}` names its run")
    if is_other:
        raise UnknownName(f"{name!r} is a run, expected a task; `megaflow status {name}` lists its tasks")
    if target is None:
        kin = kind.removesuffix("s")
        near = did_you_mean(name, _names(database, kind, user_name))
        raise UnknownName(f"unknown {kin} {name!r};{near} `megaflow runs` and `megaflow status RUN` list names and ids")
    return target


def _names(database: Database, kind: str, user_name: str | None) -> list[str]:
    """Returns the names of the newest runs or tasks."""
    statement = f"SELECT name FROM {kind} o WHERE {_OF_USER} ORDER BY id DESC LIMIT 2000"  # noqa: S608
    rows = database.sql(statement, {"user": user_name})
    return list(dict.fromkeys(rows.scalars()))


@dataclass(frozen=True, slots=True)
class NameLookup:
    """Looks names up among everybody's runs and tasks, or one user's."""

    connection: Connection
    user_name: str | None

    def run(self, name: str) -> UUID | None:
        newest = f"SELECT id FROM runs o WHERE {_OF_USER}{{}} ORDER BY created_at DESC, id DESC LIMIT 1"  # noqa: S608
        if name == LATEST:
            return self._one(newest.format(""))
        return self._one(newest.format(" AND name = :name"), name=name) or self._by_id("runs", name)

    def run_or_none(self, name: str) -> UUID | None:
        try:
            return self.run(name)
        except AmbiguousName:
            return None

    def task_or_none(self, name: str) -> UUID | None:
        try:
            return self.task(name)
        except AmbiguousName:
            return None

    def task(self, name: str) -> UUID | None:
        if name == LATEST:
            run = self.run(LATEST)
            ordered = "SELECT id FROM tasks WHERE run_id = :run ORDER BY finished_at DESC NULLS LAST, id LIMIT 1"
            return None if run is None else self._one(ordered, run=run)
        if (task_id := self._named(name, None)) is not None:
            return task_id
        for place in (one.start() for one in re.finditer("/", name)):  # names of both may hold slashes
            run = self.run_or_none(name[:place])
            if run is not None and (task_id := self._named(name[place + 1 :], run)) is not None:
                return task_id
        return self._by_id("tasks", name)

    def _named(self, name: str, run: UUID | None) -> UUID | None:
        """Returns the task of this name: of `run`, or of the newest run that has one."""
        plain, _, replica = name.rpartition("#") if re.fullmatch(r".+#\d{1,6}", name) else (name, "", "")
        within = ("" if run is None else " AND o.run_id = :run") + (" AND o.replica = :replica" if replica else "")
        statement = (
            f"SELECT o.id FROM tasks o JOIN runs r ON r.id = o.run_id WHERE {_OF_USER} AND o.name = :name{within}"  # noqa: S608
            " ORDER BY r.created_at DESC, o.replica, o.id LIMIT 1"
        )
        return self._one(statement, name=plain, run=run, replica=int(replica or 0))

    def _by_id(self, kind: str, name: str) -> UUID | None:
        part = name.lower().replace("-", "")
        if not _ID_PART.fullmatch(part):
            return None
        statement = (
            f"SELECT id FROM {kind} o WHERE {_OF_USER} AND (replace(id::text, '-', '') LIKE :head"  # noqa: S608
            " OR replace(id::text, '-', '') LIKE :tail) LIMIT 2"
        )
        values = {"head": f"{part}%", "tail": f"%{part}", "user": self.user_name}
        ids = list(sql(self.connection, statement, values).scalars())
        if len(ids) > 1:
            known = ", ".join(str(one) for one in ids)
            kin = kind.removesuffix("s")
            raise AmbiguousName(f"more than one {kin} fits {name!r}, e.g. {known}; expected more of the id")
        return UUID(str(ids[0])) if ids else None

    def _one(self, statement: str, **values: object) -> UUID | None:
        row_id = sql(self.connection, statement, {**values, "user": self.user_name}).scalar()
        return None if row_id is None else UUID(str(row_id))
