"""Reads the data of a report on each task of a run: its outcome, cost, time, instance and image."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from app.ledger.database import Database
from app.ledger.results import task_ids
from app.ledger.validations import ImageState, states_of_run
from app.models.outcome import Phase
from app.models.validation import ValidationState

Price = Callable[[str, str], float | None]
"""USD for an hour of an instance, by its provider and class; None: unknown."""
GRADED_ON = "LEFT JOIN instances g ON g.id = coalesce((a.environment->>'graded_on')::uuid, a.instance_id)"
"""SQL join of the instance that graded an attempt: a grader, else the instance of the attempt."""
GRADING_S = (
    "extract(epoch FROM (a.phases->>'graded')::timestamptz"
    " - coalesce(a.phases->>'grading_started', a.phases->>'agent_ended')::timestamptz)::float8"
)
"""SQL for the seconds that the verifier worked on an attempt, without the wait for a grader; null: it did not work."""


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A task of a run: its last attempt's outcome, and the spec that it was submitted with."""

    task_id: UUID
    name: str
    replica: int
    agent: str
    model: str | None
    state: str
    end_reason: str | None
    verdict: dict[str, Any]
    failure: dict[str, Any]
    scripted: bool
    attempts: int
    cost_usd: float | None  # of all its attempts
    environment: dict[str, Any]  # of the last attempt
    phases: dict[str, str]
    host: str | None
    spec: dict[str, Any]
    spec_digest: str = ""
    validation: ValidationState | None = None  # of the task on the exact image that it ran on; None: never validated
    flipped: tuple[str, ...] = ()  # tests on which that validation's replicas disagreed
    patch_sha256: str | None = None  # of the graded patch; None: no patch was stored
    grading_s: float | None = None  # verifiers' seconds over all its attempts
    grading_usd: float | None = None  # of the slots used for grading, where a price is known

    @property
    def memory_kills(self) -> int | None:
        """Processes killed for a memory limit of the task in the last attempt; None: not measured."""
        if (memory := self.environment.get("memory")) is None:
            return None
        services: dict[str, Any] = memory.get("services", {})
        return round(sum(sum(one.get("killed", {}).values()) for one in (memory, *services.values())))

    @property
    def throttled_s(self) -> float | None:
        """Seconds in which the CPU limit throttled the last attempt; None: not measured."""
        cpu = self.environment.get("cpu")
        return None if cpu is None else float(sum(cpu["throttled_s"].values()))

    @property
    def agent_s(self) -> float | None:
        """Seconds that the agent worked in the last attempt."""
        return self._between(Phase.AGENT_STARTED, Phase.AGENT_ENDED)

    def _between(self, begin: Phase, end: Phase) -> float | None:
        begun, ended = self.phases.get(begin), self.phases.get(end)
        if not begun or not ended:
            return None
        return (datetime.fromisoformat(ended) - datetime.fromisoformat(begun)).total_seconds()


_COLUMNS = f"""
SELECT t.id AS task_id, t.name, t.replica, t.agent, t.model, t.state, t.end_reason, t.verdict, t.failure, t.scripted,
    t.attempts, t.spec_digest, a.environment, a.phases, i.host,
    (SELECT sha256 FROM artifacts WHERE attempt_id = a.id AND kind = 'patch') AS patch_sha256,
    (SELECT sum(cost_usd) FROM attempts WHERE task_id = t.id) AS cost_usd,
    (SELECT jsonb_agg(jsonb_build_array({GRADING_S}, g.provider, g.resource_class, g.slots))
        FROM attempts a {GRADED_ON} WHERE a.task_id = t.id AND {GRADING_S} IS NOT NULL) AS gradings
FROM tasks t LEFT JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
LEFT JOIN instances i ON i.id = a.instance_id
"""  # noqa: S608 (no input)
_ROWS = text(f"{_COLUMNS} WHERE t.run_id = :run ORDER BY t.name, t.agent, t.replica")
_BATCH = text(f"{_COLUMNS} WHERE t.id = ANY(:ids) ORDER BY t.id")


def rows(database: Database, run_id: UUID, price: Price | None = None) -> list[ReportRow]:
    """Returns every task of a run by name, agent and replica; a spec that several tasks share is parsed once."""
    known = states_of_run(database, run_id)
    with database.begin() as connection:
        report = _made(connection, connection.execute(_ROWS, {"run": run_id}).all(), price)
    return [_validated(row, known.get(row.task_id)) for row in report]


def _validated(row: ReportRow, found: ImageState | None) -> ReportRow:
    return row if found is None else replace(row, validation=found.state, flipped=found.flipped)


def batches(database: Database, run_id: UUID, *, most: int = 100) -> Iterator[list[ReportRow]]:
    """Yields the same rows in the order of acceptance, at most `most` at once; only the ids of all are in memory."""
    ids = task_ids(database, run_id)
    for begin in range(0, len(ids), most):
        with database.begin() as connection:
            records = connection.execute(_BATCH, {"ids": ids[begin : begin + most]}).all()
            batch = _made(connection, records)
        yield batch


def place_usd(price: Price | None, provider: str | None, resource_class: str | None, slots: int | None) -> float | None:
    """Returns USD for an hour of one slot of an instance; None: unknown, or no such instance."""
    hour_usd = price(provider, resource_class) if price and provider and resource_class else None
    return hour_usd / max(1, slots or 1) if hour_usd is not None else None


def _made(connection: Connection, found: Sequence[Row[Any]], price: Price | None = None) -> list[ReportRow]:
    digests = sorted({row.spec_digest for row in found})
    bodies = connection.execute(
        text("SELECT digest, body FROM specs WHERE digest = ANY(:digests)"), {"digests": digests}
    )
    specs = {row.digest: json.loads(row.body) for row in bodies}
    report = []
    for row in found:
        values = row._asdict()
        values["spec"] = specs[row.spec_digest]
        gradings = values.pop("gradings")
        if gradings:
            values["grading_s"] = sum(seconds for seconds, *_ in gradings)
            hours = [(seconds / 3600, place_usd(price, *place)) for seconds, *place in gradings]
            paid = [used * usd for used, usd in hours if usd is not None]
            values["grading_usd"] = sum(paid) if paid else None
        for name in ("verdict", "failure", "environment", "phases"):
            values[name] = values[name] or {}
        report.append(ReportRow(**values))
    return report
