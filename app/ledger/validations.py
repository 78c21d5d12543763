"""Reads and writes validations of tasks on images: the reliable tasks, and those in quarantine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, func
from sqlalchemy.dialects.postgresql import insert

from app.ledger.database import Database, sql
from app.models.service_tables import ValidationRow
from app.models.validation import Validation, ValidationState, content_of

__all__ = ["ImageState", "TaskIdentity", "identities", "of_names", "quarantined", "record", "states_of_run"]


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """Identity of a task across runs."""

    content: str
    dataset: str
    name: str
    image: str  # for display


def record(database: Database, found: Iterable[Validation]) -> None:
    """Stores the states of tasks on images, replacing earlier ones. A row with an image replaces the one without."""
    with database.begin() as connection:
        for one in found:
            _write(connection, one)


def _write(connection: Connection, one: Validation) -> None:
    details = one.model_dump(mode="json", include={"rewards", "flipped", "findings", "runs"})
    values = {
        **one.model_dump(include={"content", "image_id", "dataset", "task", "image", "reason"}),
        "state": one.state.value,
        "details": details,
    }
    changed = {name: values[name] for name in ("dataset", "task", "image", "state", "reason", "details")}
    statement = insert(ValidationRow).values(**values)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["content", "image_id"], set_={**changed, "changed_at": func.now()}
        )
    )
    if one.image_id:
        content = {"content": one.content}
        sql(connection, "DELETE FROM validations WHERE content = :content AND image_id = ''", content)


_OF_NAMES = """
SELECT content, image_id, dataset, task, image, state, reason, details FROM validations
WHERE task = ANY(:names) ORDER BY changed_at DESC, image_id
"""


def of_names(connection: Connection, names: Sequence[str]) -> list[Validation]:
    """Returns all validations of tasks of these names, the newest first."""
    return [_validation(row._asdict()) for row in sql(connection, _OF_NAMES, {"names": list(names)})]


def quarantined(connection: Connection, names: Sequence[str]) -> dict[str, Validation]:
    """Returns the tasks of these names whose newest validation put them in quarantine, by their content."""
    newest: dict[str, Validation] = {}
    for one in of_names(connection, names):
        newest.setdefault(one.content, one)
    return {content: one for content, one in newest.items() if one.state is ValidationState.QUARANTINED}


def _validation(row: Mapping[str, Any]) -> Validation:
    values = dict(row)
    return Validation(**values.pop("details"), **values)


def identities(database: Database, run_id: UUID) -> dict[UUID, TaskIdentity]:
    """Returns the identities of a run's tasks, by their id in the run."""
    with database.begin() as connection:
        return _identities(connection, run_id, None)


def _identities(connection: Connection, run_id: UUID, only: Sequence[UUID] | None) -> dict[UUID, TaskIdentity]:
    tasks = sql(connection, "SELECT id, spec_digest FROM tasks WHERE run_id = :run", {"run": run_id}).all()
    if only is not None:
        tasks = [row for row in tasks if row.id in set(only)]
    bodies = sql(
        connection,
        "SELECT digest, body FROM specs WHERE digest = ANY(:digests)",
        {"digests": sorted({row.spec_digest for row in tasks})},
    )
    specs = {row.digest: _identity(json.loads(row.body)["task"]) for row in bodies}
    return {row.id: specs[row.spec_digest] for row in tasks}


def _identity(task: Mapping[str, Any]) -> TaskIdentity:
    environment = task["environment"]
    build, compose = environment.get("build"), environment.get("compose")
    source = build or compose
    label = environment.get("image") or f"{'build' if build else 'compose'}:{source['context']['sha256'][:12]}"
    return TaskIdentity(content_of(task), str(task["dataset"]), str(task["name"]), str(label))


@dataclass(frozen=True, slots=True)
class ImageState:
    """Result of a validation of a task on the image that an attempt ran on."""

    state: ValidationState
    flipped: tuple[str, ...]  # tests on which replicas of oracle, or of nop, disagreed
    reason: str = ""


_KNOWN = """
SELECT t.id, v.content, v.state, v.reason, v.details->'flipped' AS flipped FROM tasks t
JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
JOIN validations v ON v.task = t.name AND v.image_id = coalesce(a.environment->>'image_id', '')
WHERE t.run_id = :run
"""


def states_of_run(database: Database, run_id: UUID) -> dict[UUID, ImageState]:
    """Returns the state of each task of a run that was validated on the exact image that it ran on; no other tasks."""
    with database.begin() as connection:
        rows = sql(connection, _KNOWN, {"run": run_id}).all()
        if not rows:
            return {}
        known = _identities(connection, run_id, [row.id for row in rows])
    return {
        row.id: ImageState(ValidationState(row.state), tuple(row.flipped or ()), row.reason)
        for row in rows
        if known[row.id].content == row.content
    }
