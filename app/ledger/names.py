"""Resolves what a person calls a run or a task: an id, its end, a name, `RUN/TASK`, `latest`."""

from __future__ import annotations

import re
from uuid import UUID

from sqlalchemy import Connection

from app.errors import AmbiguousName, UnknownName, did_you_mean
from app.ledger.database import Database, sql

LATEST = "latest"
_ID_PART = re.compile(r"[0-9a-f]{4,32}")


def find(database: Database, kind: str, name: str) -> UUID:
    """The run or task (`kind`: runs | tasks) that is meant.

    A run: `latest`, a name (of several runs the newest), an id or its beginning or end. A task: the same, and
    `RUN/TASK`; a name means the task of the newest run that has one, `NAME#2` its replica 2.

    Raises: UnknownName; AmbiguousName: more than one id fits.
    """
    with database.begin() as connection:
        found = _run(connection, name) if kind == "runs" else _task(connection, name)
    if found is None and kind == "tasks" and _is_run(database, name):
        raise UnknownName(f"{name!r} is a run, expected a task; `megaflow status {name}` lists its tasks")
    if found is None:
        kin = kind.removesuffix("s")
        near = did_you_mean(name, _names(database, kind))
        raise UnknownName(f"unknown {kin} {name!r};{near} `megaflow runs` and `megaflow status RUN` list names and ids")
    return found


def _names(database: Database, kind: str) -> list[str]:
    """Of the newest runs or tasks."""
    with database.begin() as connection:
        found = sql(connection, f"SELECT name FROM {kind} ORDER BY id DESC LIMIT 2000", {})  # noqa: S608
        return list(dict.fromkeys(found.scalars()))


def namesakes(database: Database, task_id: UUID) -> tuple[int, int]:
    """How many other tasks have the task's name, and in how many other runs."""
    statement = """
        SELECT count(*) AS tasks, count(DISTINCT o.run_id) FILTER (WHERE o.run_id <> t.run_id) AS runs
        FROM tasks t JOIN tasks o ON o.name = t.name AND o.id <> t.id WHERE t.id = :id"""
    with database.begin() as connection:
        row = sql(connection, statement, {"id": task_id}).one()
        return row.tasks, row.runs


def _is_run(database: Database, name: str) -> bool:
    with database.begin() as connection:
        return _run_or_none(connection, name) is not None


def _run(connection: Connection, name: str) -> UUID | None:
    newest = "SELECT id FROM runs{} ORDER BY created_at DESC, id DESC LIMIT 1"
    if name == LATEST:
        return _one(connection, newest.format(""), {})
    named = _one(connection, newest.format(" WHERE name = :name"), {"name": name})
    return named or _by_id(connection, "runs", name)


def _task(connection: Connection, name: str) -> UUID | None:
    if name == LATEST:
        run = _run(connection, LATEST)
        ordered = "SELECT id FROM tasks WHERE run_id = :run ORDER BY finished_at DESC NULLS LAST, id LIMIT 1"
        return None if run is None else _one(connection, ordered, {"run": run})
    if (found := _named(connection, name, None)) is not None:
        return found
    for place in (one.start() for one in re.finditer("/", name)):  # names of both may hold slashes
        run = _run_or_none(connection, name[:place])
        if run is not None and (found := _named(connection, name[place + 1 :], run)) is not None:
            return found
    return _by_id(connection, "tasks", name)


def _run_or_none(connection: Connection, name: str) -> UUID | None:
    try:
        return _run(connection, name)
    except AmbiguousName:
        return None


def _named(connection: Connection, name: str, run: UUID | None) -> UUID | None:
    """By its name, of the newest run or of this one."""
    plain, _, replica = name.rpartition("#") if re.fullmatch(r".+#\d{1,6}", name) else (name, "", "")
    within = ("" if run is None else " AND t.run_id = :run") + (" AND t.replica = :replica" if replica else "")
    statement = (
        f"SELECT t.id FROM tasks t JOIN runs r ON r.id = t.run_id WHERE t.name = :name{within}"  # noqa: S608
        " ORDER BY r.created_at DESC, t.replica, t.id LIMIT 1"
    )
    return _one(connection, statement, {"name": plain, "run": run, "replica": int(replica or 0)})


def _by_id(connection: Connection, kind: str, name: str) -> UUID | None:
    part = name.lower().replace("-", "")
    if not _ID_PART.fullmatch(part):
        return None
    statement = (
        f"SELECT id FROM {kind} WHERE replace(id::text, '-', '') LIKE :head"  # noqa: S608
        " OR replace(id::text, '-', '') LIKE :tail LIMIT 2"
    )
    found = list(sql(connection, statement, {"head": f"{part}%", "tail": f"%{part}"}).scalars())
    if len(found) > 1:
        known = ", ".join(str(one) for one in found)
        kin = kind.removesuffix("s")
        raise AmbiguousName(f"more than one {kin} fits {name!r}, e.g. {known}; expected more of the id")
    return UUID(str(found[0])) if found else None


def _one(connection: Connection, statement: str, values: dict[str, object]) -> UUID | None:
    found = sql(connection, statement, values).scalar()
    return None if found is None else UUID(str(found))
