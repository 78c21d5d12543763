"""Accepts tasks in one transaction. After the commit, only loss of the database can lose them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors as driver_errors
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, select
from sqlalchemy.dialects.postgresql import insert
from uuid_utils import compat as uuids

from app.errors import IdempotencyConflict, OptionInvalid, SpecInvalid
from app.ledger import classes, events, graphs, quotas
from app.ledger.database import Database
from app.ledger.events import Fact
from app.ledger.names import LATEST
from app.models.graphs import NO_UPSTREAM, ComesAfter
from app.models.groups import NO_RULES, GroupRules
from app.models.kinds import Purpose
from app.models.spec import MOST_PRIORITY, MOST_WAIT_S, LabelText, TaskSpec
from app.models.tables import RunRow, TaskRow
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to submit. Every spec becomes `replicas` tasks, which form one group."""

    specs: Sequence[TaskSpec]
    replicas: int = 1
    name: str = ""
    user_name: str = "default"
    purpose: Purpose = Purpose.EVALUATION
    priority: int = 0
    idempotency_key: str | None = None  # of the whole run
    available_at: datetime | None = None  # earliest start; None: at once
    deadline_at: datetime | None = None  # tasks that have not ended by then end as `expired`
    budget_usd: float | None = None  # for model calls of all tasks together; None: no limit
    max_running: int | None = None  # most attempts at once; None: no limit
    include_quarantined: bool = False  # also accept tasks in quarantine
    groups: GroupRules = NO_RULES  # of a training run
    upstream: ComesAfter = NO_UPSTREAM  # dependencies of all its tasks, and the files that they get from them
    provenance: dict[str, Any] | None = None  # of its tasks, as JSON: datasets, revisions, content, selection


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted run with its tasks' ids, in the order of the specs and, within one spec, of the replicas."""

    run_id: UUID
    task_ids: tuple[UUID, ...]
    names: tuple[str, ...] = field(default=())
    existed: bool = False  # an earlier submission with the same key was found; nothing new was written


def accept(database: Database, new: NewRun, settings: Settings | None = None) -> Accepted:
    """Writes the run, its specs and tasks, and the events, in one transaction; wakes the dispatcher.

    With an idempotency key that was used before, returns that run if its tasks are the same. With `settings`, tasks
    that their resource class could never run are refused.

    Raises: IdempotencyConflict: the key belongs to other tasks; SpecInvalid: an unknown class or one without capacity,
        a deadline in the past; UnknownName: it depends on a task that is not the user's; QuotaExceeded: too many tasks
        are waiting; DatabaseUnavailable. After an error nothing was written, except perhaps after DatabaseUnavailable:
        submit again with the same key to find out.
    """
    _check(new)
    run_id = uuids.uuid7()
    with database.begin() as connection:
        if not _insert_run(connection, run_id, new):
            return _earlier(connection, new)
        if settings is not None:
            classes.check(connection, settings, {(spec.mode, spec.resource_class) for spec in new.specs})
            classes.check_sizes(connection, settings, new.specs)
        if new.upstream.all:
            graphs.check(connection, new.user_name, new.upstream)
        quotas.check_pending(connection, new.user_name, len(new.specs) * new.replicas)
        return _load(connection, run_id, new)


_LABEL = TypeAdapter(LabelText)
_MOST_TASKS = 1_000_000
"""Limit per run: its tasks are written in one transaction, with their ids in memory."""


def _check(new: NewRun) -> None:
    for what, label in (("the run's name", new.name), ("the user's name", new.user_name)):
        try:
            _LABEL.validate_python(label)
        except ValidationError as error:
            raise OptionInvalid(f"{what}: {error.errors()[0]['ctx']['error']}; nothing was submitted") from error
    if not new.user_name.strip() or new.name == LATEST:
        raise OptionInvalid(
            f"expected a user's name that is not empty, and a run's name other than {LATEST!r}, which commands"
            f" understand as the newest run; found {new.user_name!r} and {new.name!r}; nothing was submitted"
        )
    new.groups.check(new.replicas, new.purpose)
    if (count := len(new.specs) * new.replicas) > _MOST_TASKS:
        raise OptionInvalid(
            f"expected at most {_MOST_TASKS} tasks in a run, found {count} ({len(new.specs)} with {new.replicas}"
            " replicas each); try several runs; nothing was submitted"
        )
    new.upstream.check()
    if abs(new.priority) > MOST_PRIORITY:
        raise OptionInvalid(f"expected a priority from -{MOST_PRIORITY} to {MOST_PRIORITY}, found {new.priority}")
    if new.budget_usd is not None and not new.budget_usd > 0:
        raise OptionInvalid(f"expected a budget of more than 0 US dollars, found {new.budget_usd:g}")
    if new.max_running is not None and new.max_running < 1:
        raise OptionInvalid(f"expected at least 1 attempt of the run at once, found {new.max_running}")
    for name, at in (("deadline", new.deadline_at), ("available_at", new.available_at)):
        if at is not None and at.tzinfo is None:
            raise OptionInvalid(f"expected {name} with a time zone, found {at.isoformat()}; try datetime.now(UTC) + …")
        if at is not None and at > datetime.now(UTC) + timedelta(seconds=MOST_WAIT_S):
            raise OptionInvalid(f"expected {name} within ten years, found {at.isoformat()}")
    if new.deadline_at is None:
        return
    begin = max(datetime.now(UTC), new.available_at or datetime.min.replace(tzinfo=UTC))
    if new.deadline_at <= begin:
        raise OptionInvalid(
            f"expected a deadline after {begin:%Y-%m-%d %H:%M:%S %Z}, when the tasks may begin, found"
            f" {new.deadline_at.isoformat()}; nothing was submitted"
        )


def _insert_run(connection: Connection, run_id: UUID, new: NewRun) -> bool:
    """Inserts the run; False: its idempotency key is in use. A concurrent submission with the same key waits."""
    statement = (
        insert(RunRow)
        .values(
            id=run_id,
            name=new.name or str(run_id)[-12:],
            user_name=new.user_name,
            purpose=new.purpose,
            total=len(new.specs) * new.replicas,
            deadline_at=new.deadline_at,
            budget_usd=new.budget_usd,
            max_running=new.max_running,
            idempotency_key=new.idempotency_key,
            provenance=new.provenance,
            quorum=new.groups.quorum,
            hedge_after=new.groups.percent,
            most_replicas=new.groups.most,
        )
        .on_conflict_do_nothing(index_elements=["user_name", "idempotency_key"])
    )
    return connection.execute(statement.returning(RunRow.id)).first() is not None


def _earlier(connection: Connection, new: NewRun) -> Accepted:
    runs, tasks = RunRow.__table__.c, TaskRow.__table__.c
    run_id = connection.execute(
        select(runs.id).where(runs.user_name == new.user_name, runs.idempotency_key == new.idempotency_key)
    ).scalar_one()
    rows = connection.execute(
        select(tasks.id, tasks.name, tasks.spec_digest)
        .where(tasks.run_id == run_id, tasks.added_for.is_(None))
        .order_by(tasks.id)
    ).all()
    digests = [spec.digest() for spec in new.specs for _ in range(new.replicas)]
    if [row.spec_digest for row in rows] != digests:
        raise IdempotencyConflict(
            f"idempotency key {new.idempotency_key!r} was used by run {run_id} for {len(rows)} other task(s);"
            f" expected the same tasks again or a new key"
        )
    graphs.check_same(connection, run_id, new.upstream, new.idempotency_key)
    return Accepted(run_id, tuple(row.id for row in rows), tuple(row.name for row in rows), existed=True)


def _load(connection: Connection, run_id: UUID, new: NewRun) -> Accepted:
    driver: psycopg.Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
    digests = _copy_specs(driver, new.specs)
    ids: list[UUID] = []
    of_run = _of_run(new)
    with driver.cursor().copy(f"COPY tasks ({_COLUMNS}) FROM STDIN") as copy:
        for spec, digest in zip(new.specs, digests, strict=True):
            of_group, group = _of_group(spec, digest), uuids.uuid7().hex
            for replica in range(new.replicas):  # the tasks of a group differ only in id and replica
                ids.append(uuids.uuid7())
                copy.write_row((ids[-1].hex, run_id.hex, group, replica, *of_group, *of_run))
    if new.upstream.all:  # last, because it locks
        graphs.add(connection, run_id, new.upstream)
    # One event for the whole run: an event per accepted task would double what a bulk load writes.
    events.append(connection, Fact("run.accepted", run_id=run_id, data={"tasks": len(ids), "name": new.name}))
    events.wake_dispatcher(connection)
    names = tuple(spec.task.name for spec in new.specs for _ in range(new.replicas))
    return Accepted(run_id, tuple(ids), names)


_COLUMNS = (
    "id, run_id, group_id, replica, spec_digest, name, agent, model, requested_mode, resource_class, max_attempts,"
    " lifetime_s, graded_apart, user_name, priority, in_line, waits, bounded, available_at, deadline_at"
)


def _of_run(new: NewRun) -> tuple[Any, ...]:
    """Returns the column values shared by all tasks of the run: the end of `_COLUMNS`, from `user_name` on."""
    now, waits = datetime.now(UTC), bool(new.upstream.all)
    return (
        new.user_name,
        new.priority,
        not waits and (new.available_at is None or new.available_at <= now),
        waits,
        new.max_running is not None,
        (new.available_at or now).isoformat(),
        new.deadline_at.isoformat() if new.deadline_at else None,
    )


def _of_group(spec: TaskSpec, digest: str) -> tuple[Any, ...]:
    """Returns the column values shared by the tasks of a group: the middle of `_COLUMNS`."""
    limits = spec.task.limits
    return (
        digest,
        spec.task.name,
        spec.agent,
        spec.model.name if spec.model else None,
        spec.mode.value,
        spec.resource_class,
        limits.max_attempts,
        limits.lifetime_s,
        spec.task.graded_apart,
    )


_PROBE = 50
"""Number of specs looked up first: if one of them exists, the dataset has probably been submitted before."""


def _copy_specs(driver: psycopg.Connection[Any], specs: Sequence[TaskSpec]) -> list[str]:
    """Writes the specs that are new; returns the digests of all, in the given order."""
    probe = [spec.digest() for spec in specs[:_PROBE]]
    known = driver.execute("SELECT 1 FROM specs WHERE digest = ANY(%s) LIMIT 1", [probe]).fetchone()
    if known is None:
        try:
            with driver.transaction():
                return _stream_specs(driver, "specs", specs)
        except driver_errors.UniqueViolation:  # a spec outside the probe existed already
            pass
    driver.execute("CREATE TEMP TABLE new_specs (digest text, body text) ON COMMIT DROP")
    digests = _stream_specs(driver, "new_specs", specs)
    driver.execute("INSERT INTO specs SELECT * FROM new_specs ORDER BY digest ON CONFLICT DO NOTHING")
    return digests


_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""NUL escape in JSON; after an escaped backslash, these are six ordinary characters instead."""


def _stream_specs(driver: psycopg.Connection[Any], table: str, specs: Sequence[TaskSpec]) -> list[str]:
    """Streams specs to a table: the server stores sent specs while the next ones are converted to JSON."""
    digests: list[str] = []
    seen: set[str] = set()
    with driver.cursor().copy(f"COPY {table} (digest, body) FROM STDIN".encode()) as copy:
        for spec in specs:
            body = spec.model_dump_json()
            if "\\u0000" in body and _NUL.search(body):
                raise SpecInvalid(
                    f"task {spec.task.name!r}: expected text that PostgreSQL can hold, found a NUL character, such as"
                    " in a dataset's row or an agent's argument; nothing was submitted"
                )
            digest = spec.digest_of(body)
            digests.append(digest)
            if digest not in seen:
                seen.add(digest)
                copy.write_row((digest, body))
    return digests
