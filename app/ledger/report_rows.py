"""Reads what a report says of each task of a run: its outcome, cost and time, and what it was run on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text

from app.errors import UnknownName
from app.ledger.database import Database
from app.ledger.validations import states_of_run
from app.models.outcome import Phase
from app.models.validation import ValidationState

__all__ = ["ReportRow", "RunHead", "head", "rows"]


@dataclass(frozen=True, slots=True)
class RunHead:
    """The run that is reported."""

    id: UUID
    name: str
    user_name: str
    created_at: datetime
    provenance: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One task of a run: its last attempt's outcome, and the spec that it was submitted with."""

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
    validation: ValidationState | None = None  # of the task on the very image that it ran on; None: never validated

    @property
    def agent_s(self) -> float | None:
        """Seconds that the agent worked in the last attempt."""
        begun, ended = self.phases.get(Phase.AGENT_STARTED), self.phases.get(Phase.AGENT_ENDED)
        if not begun or not ended:
            return None
        return (datetime.fromisoformat(ended) - datetime.fromisoformat(begun)).total_seconds()


_ROWS = text("""
SELECT t.id AS task_id, t.name, t.replica, t.agent, t.model, t.state, t.end_reason, t.verdict, t.failure, t.scripted,
    t.attempts, t.spec_digest, a.environment, a.phases, i.host,
    (SELECT sum(cost_usd) FROM attempts WHERE task_id = t.id) AS cost_usd
FROM tasks t LEFT JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
LEFT JOIN instances i ON i.id = a.instance_id
WHERE t.run_id = :run ORDER BY t.name, t.agent, t.replica
""")


def head(database: Database, run_id: UUID) -> RunHead:
    """Raises: UnknownName."""
    with database.begin() as connection:
        statement = text("SELECT id, name, user_name, created_at, provenance FROM runs WHERE id = :run")
        row = connection.execute(statement, {"run": run_id}).first()
    if row is None:
        raise UnknownName(f"unknown run {run_id}; `megaflow runs` lists them")
    return RunHead(**row._asdict())


def rows(database: Database, run_id: UUID) -> list[ReportRow]:
    """Every task of a run by name, agent and replica; a spec that several share is parsed once."""
    bodies = text("SELECT digest, body FROM specs WHERE digest IN (SELECT spec_digest FROM tasks WHERE run_id = :run)")
    with database.begin() as connection:
        specs = {row.digest: json.loads(row.body) for row in connection.execute(bodies, {"run": run_id})}
        found = connection.execute(_ROWS, {"run": run_id}).all()
    made, known = [], states_of_run(database, run_id)
    for row in found:
        values = row._asdict() | {"validation": known.get(row.task_id)}
        values["spec"] = specs[values.pop("spec_digest")]
        for name in ("verdict", "failure", "environment", "phases"):
            values[name] = values[name] or {}
        made.append(ReportRow(**values))
    return made
