"""Keeps each group of a training run at the replicas that it needs: what is no longer needed ends as `superseded`."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection

from app.ledger import gradings
from app.ledger.database import sql
from app.models.endings import EndReason, RetryPolicy
from app.models.outcome import Failure

GRACE_S = 3.0
"""A superseded attempt that has not stopped this long after the request is taken away from its worker."""
_FAILURE = Failure(error="StaleWriter", message="its group is complete and its worker did not stop when told to")


def stop_superseded(connection: Connection, retry: RetryPolicy) -> list[UUID]:
    """The superseded attempts that still run, to be told again: a message may be lost. Hung ones are taken away."""
    rows = sql(
        connection,
        "SELECT a.id, t.cancel_requested_at < clock_timestamp() - make_interval(secs => :grace) AS hung FROM tasks t"
        " JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts WHERE t.cancel_reason = 'superseded'"
        " AND t.state = 'running' AND a.state IN ('running', 'grading') FOR UPDATE OF a SKIP LOCKED",
        {"grace": GRACE_S},
    ).all()
    hung = [row.id for row in rows if row.hung]
    gradings.take_away(connection, hung, _FAILURE, EndReason.SUPERSEDED, retry)
    return [row.id for row in rows]
