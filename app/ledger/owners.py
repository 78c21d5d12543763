"""Who has what the engine cannot name: an environment that was made for nobody tells only its taker's attempt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text

from app.ledger.database import Database
from app.ledger.receipts import Owner
from app.models.states import LIVE_INSTANCE


@dataclass(frozen=True, slots=True)
class ResourceUser:
    """An attempt that took something over, and whether the instance that it runs on has not ended."""

    owner: Owner
    lives: bool


_TAKERS = text(
    "SELECT a.id, a.task_id, t.run_id, a.instance_id, i.state FROM attempts a JOIN tasks t ON t.id = a.task_id"
    " JOIN instances i ON i.id = a.instance_id WHERE a.id = ANY(CAST(:ids AS uuid[]))"
)


def resource_users(database: Database, attempt_ids: Collection[UUID]) -> dict[UUID, ResourceUser]:
    """By attempt; without those that the ledger does not know, or that nobody has claimed.

    Raises: DatabaseUnavailable.
    """
    if not attempt_ids:
        return {}
    with database.begin() as connection:
        rows = connection.execute(_TAKERS, {"ids": list(attempt_ids)})
        return {
            row.id: ResourceUser(Owner(row.run_id, row.task_id, row.id, row.instance_id), row.state in LIVE_INSTANCE)
            for row in rows
        }
