"""Pauses and resumes the admission of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text
from sqlalchemy.dialects.postgresql import insert

from app.errors import UnknownName
from app.ledger import admission, events, results
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.tables import PAUSED, PauseRow

_KIND = "run"
"""Kind of all rows: only runs are paused. A user is stopped by a quota, a class by its capacity."""


@dataclass(frozen=True, slots=True)
class Change:
    """Result of a pause or a resumption. `changed` is False when the run was in that state already."""

    run_id: UUID
    changed: bool
    waiting: int  # its waiting tasks


def limit_name(run_id: UUID) -> str:
    """Returns the name of a pause among the limits: `pause:run:ID`."""
    return f"pause:{_KIND}:{run_id}"


def pause(database: Database, run: str, reason: str = "") -> Change:
    """Stops admitting tasks of a run. A second pause changes nothing: `since` and `reason` stay as the first one set.

    Raises: UnknownName; AmbiguousName.
    """
    run_id = results.find(database, "runs", run)
    with database.begin() as connection:
        admission.in_turn(connection)  # else a resumption at the same time leaves tasks without their pause
        return _pause(connection, run_id, reason)


def _pause(connection: Connection, run_id: UUID, reason: str) -> Change:
    row = insert(PauseRow).values(kind=_KIND, name=str(run_id), reason=reason).on_conflict_do_nothing()
    changed = connection.execute(row.returning(PauseRow.name)).first() is not None
    sql(
        connection,
        "WITH mine AS MATERIALIZED (SELECT id FROM tasks WHERE run_id = :run AND state = 'pending'"
        " AND (in_line OR available_at <= clock_timestamp()) ORDER BY id FOR UPDATE)"
        " UPDATE tasks t SET in_line = false, available_at = CAST(:paused AS timestamptz)"
        " FROM mine WHERE t.id = mine.id",
        {"run": run_id, "paused": PAUSED},
    )
    if changed:
        connection.execute(_OPEN, {"limit": limit_name(run_id)})
        events.append(connection, Fact("run.paused", run_id, data={"reason": reason} if reason else {}))
        events.wake_dispatcher(connection)
    return Change(run_id, changed, _waiting(connection, run_id))


def resume(database: Database, run: str) -> Change:
    """Admits a paused run's tasks again, at their old place in the queue. Raises: UnknownName; AmbiguousName."""
    run_id = results.find(database, "runs", run)
    with database.begin() as connection:
        admission.in_turn(connection)
        values = {"kind": _KIND, "name": str(run_id)}
        changed = sql(connection, "DELETE FROM pauses WHERE kind = :kind AND name = :name", values).rowcount > 0
        sql(
            connection,
            "WITH mine AS MATERIALIZED (SELECT id FROM tasks WHERE run_id = :run AND state = 'pending'"
            " AND NOT in_line AND available_at >= CAST(:paused AS timestamptz) ORDER BY id FOR UPDATE)"
            " UPDATE tasks t SET available_at = clock_timestamp() FROM mine WHERE t.id = mine.id",
            {"run": run_id, "paused": PAUSED},
        )
        if changed:
            connection.execute(_CLOSE, {"limit": limit_name(run_id)})
            events.append(connection, Fact("run.resumed", run_id))
            events.wake_dispatcher(connection)
        return Change(run_id, changed, _waiting(connection, run_id))


# The history of pauses is stored with that of the limits. `*`: the pause applies to its run, not to one queue.
_OPEN = text(
    "INSERT INTO bindings (limit_name, user_name, mode, resource_class) VALUES (:limit, '*', '*', '*')"
    " ON CONFLICT DO NOTHING"
)
_CLOSE = text(
    "UPDATE bindings SET until = clock_timestamp() WHERE limit_name = :limit AND user_name = '*' AND until IS NULL"
)


def of_run(database: Database, run_id: UUID) -> Row[Any] | None:
    """Returns `since` and `reason` of a run's pause; None: it is not paused."""
    statement = "SELECT since, reason FROM pauses WHERE kind = :kind AND name = :name"
    return database.sql(statement, {"kind": _KIND, "name": str(run_id)}).first()


def _waiting(connection: Connection, run_id: UUID) -> int:
    statement = "SELECT count(*) FROM tasks WHERE state = 'pending' AND run_id = :run"
    return int(sql(connection, statement, {"run": run_id}).scalar_one())


_SPENT = text("""
SELECT r.id, r.budget_usd, s.spent FROM runs r
CROSS JOIN LATERAL (SELECT coalesce(sum(c.cost_usd), 0) AS spent FROM model_calls c WHERE c.run_id = r.id) s
WHERE r.budget_usd IS NOT NULL AND s.spent >= r.budget_usd
    AND EXISTS (SELECT 1 FROM tasks t WHERE t.run_id = r.id AND t.state = 'pending')
    AND NOT EXISTS (SELECT 1 FROM pauses p WHERE p.kind = 'run' AND p.name = r.id::text)
""")

# A concurrent raise of the budget waits for this lock and then sees the pause; if it came first, there is no pause.
_BUDGET = text("SELECT budget_usd FROM runs WHERE id = :id FOR NO KEY UPDATE")


def hold_spent(database: Database) -> list[UUID]:
    """Pauses every run that has spent its budget for model calls and has tasks waiting; returns those paused now."""
    run_ids = [row.id for row in database.sql(_SPENT)]
    return [run_id for run_id in run_ids if _hold(database, run_id)]


def _hold(database: Database, run_id: UUID) -> bool:
    """Pauses the run if its budget is still spent; returns whether it was paused now."""
    with database.begin() as connection:
        admission.in_turn(connection)
        budget_usd = connection.execute(_BUDGET, {"id": run_id}).scalar()
        spent = spent_by(connection, run_id)
        if budget_usd is None or spent < budget_usd:
            return False
        reason = f"its budget of ${budget_usd:g} is spent (${spent:.2f}); `megaflow budget` raises it"
        return _pause(connection, run_id, reason).changed


def set_budget(database: Database, run: str, budget_usd: float | None) -> tuple[UUID, float]:
    """Sets a run's budget (None: no bound), and resumes the run when the budget exceeds its spending.

    Returns its id and its spending in US dollars. Raises: UnknownName, AmbiguousName; ValueError: not more than 0.
    """
    if budget_usd is not None and not budget_usd > 0:
        raise ValueError(f"expected more than 0 US dollars, found {budget_usd:g}")
    run_id = results.find(database, "runs", run)
    with database.begin() as connection:
        if (
            sql(
                connection, "UPDATE runs SET budget_usd = :budget WHERE id = :id", {"budget": budget_usd, "id": run_id}
            ).rowcount
            == 0
        ):
            raise UnknownName(f"no run {run!r}")
        spent = spent_by(connection, run_id)
        events.append(connection, Fact("run.budget_set", run_id, data={"budget_usd": budget_usd, "spent_usd": spent}))
        paused = sql(
            connection, "SELECT reason FROM pauses WHERE kind = 'run' AND name = :id", {"id": str(run_id)}
        ).scalar()
    if paused and paused.startswith("its budget of") and (budget_usd is None or budget_usd > spent):
        resume(database, str(run_id))
    return run_id, spent


def spent_by(connection: Connection, run_id: UUID) -> float:
    """Returns a run's spending in US dollars, for calls whose price is known."""
    spent = sql(
        connection, "SELECT coalesce(sum(cost_usd), 0) FROM model_calls WHERE run_id = :id", {"id": run_id}
    ).scalar_one()
    return float(spent)
