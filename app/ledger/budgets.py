"""Budgets of runs: money for model calls, all tasks together. Whoever has spent it is paused, and says so.

The gateway refuses further calls at once; this keeps further tasks from beginning. A user's budget is a quota
(`app.ledger.quotas`), an attempt's one of its limits.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection, text

from app.errors import UnknownName
from app.ledger import events, pauses, results
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.kinds import PauseKind

_SPENT = text("""
SELECT r.id, r.budget_usd, s.spent FROM runs r
CROSS JOIN LATERAL (SELECT coalesce(sum(c.cost_usd), 0) AS spent FROM model_calls c WHERE c.run_id = r.id) s
WHERE r.budget_usd IS NOT NULL AND s.spent >= r.budget_usd
    AND EXISTS (SELECT 1 FROM tasks t WHERE t.run_id = r.id AND t.state = 'pending')
    AND NOT EXISTS (SELECT 1 FROM pauses p WHERE p.kind = 'run' AND p.name = r.id::text)
""")

# Whoever gives it more money waits, and then sees the pause; or was first, and then there is none.
_BUDGET = text("SELECT budget_usd FROM runs WHERE id = :id FOR NO KEY UPDATE")


def hold_spent(database: Database) -> list[UUID]:
    """Pause every run that has spent its budget and still has tasks waiting; those paused now."""
    with database.begin() as connection:
        found = [row.id for row in connection.execute(_SPENT)]
    return [run_id for run_id in found if _hold(database, run_id)]


def _hold(database: Database, run_id: UUID) -> bool:
    """Pause it if that is still so."""
    with database.begin() as connection:
        budget_usd = connection.execute(_BUDGET, {"id": run_id}).scalar()
        spent = spent_by(connection, run_id)
        if budget_usd is None or spent < budget_usd:
            return False
        reason = f"its budget of ${budget_usd:g} is spent (${spent:.2f}); `megaflow budget` raises it"
        return pauses.pause_run(connection, run_id, reason).changed


def set_budget(database: Database, run: str, budget_usd: float | None) -> tuple[UUID, float]:
    """Give a run another budget (None: no bound), and let it go on when that is more than it has spent.

    Returns its id and what it has spent. Raises: UnknownName, AmbiguousName; ValueError: not more than 0.
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
        pauses.resume(database, PauseKind.RUN, str(run_id))
    return run_id, spent


def spent_by(connection: Connection, run_id: UUID) -> float:
    """US dollars, of the calls whose price is known."""
    found = sql(
        connection, "SELECT coalesce(sum(cost_usd), 0) FROM model_calls WHERE run_id = :id", {"id": run_id}
    ).scalar_one()
    return float(found)
