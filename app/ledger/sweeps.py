"""Instances that have ended and may have left something behind, and whose word it is that nothing of them is left.

Every host looks at what exists there. That an instance was swept is said by the host that it stood on; of one whose
host is not known, or cares for itself no more, by the host where the control plane's leader is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import text

from app.ledger.database import Database, sql
from app.ledger.host_images import GONE_S


class EndedInstance(NamedTuple):
    """An instance that was not swept yet. `ours`: nobody else is to say that it was."""

    id: UUID
    ours: bool


_UNSWEPT = text("""
WITH others AS MATERIALIZED (
    SELECT name FROM hosts WHERE name <> :host AND seen_at > clock_timestamp() - make_interval(secs => :gone)
), ended AS (
    SELECT id, ended_at, coalesce(host, CASE WHEN provider = 'static' THEN split_part(handle, ':', 1) END) AS stood
    FROM instances WHERE swept_at IS NULL AND state IN ('terminated', 'failed')
)
SELECT id, :control OR stood IS NOT DISTINCT FROM :host AS ours FROM ended
WHERE stood IS NULL OR stood NOT IN (SELECT name FROM others) ORDER BY ended_at LIMIT 5000
""")


def unswept(database: Database, host: str, *, control: bool) -> list[EndedInstance]:
    """Those that may have left something on `host`; the first to end first. control: the leader is there.

    Raises: DatabaseUnavailable.
    """
    with database.begin() as connection:
        rows = connection.execute(_UNSWEPT, {"host": host, "control": control, "gone": GONE_S})
        return [EndedInstance(row.id, row.ours) for row in rows]


def clock_ahead_s(database: Database) -> float:
    """By how much the ledger's clock, which attempts' deadlines go by, is ahead of this host's.

    Raises: DatabaseUnavailable.
    """
    with database.begin() as connection:
        now = sql(connection, "SELECT extract(epoch FROM clock_timestamp())::float8").scalar_one()
        return float(now) - time.time()


def swept(database: Database, instance_ids: Sequence[UUID]) -> None:
    """Nothing of these instances is left. Only the first to say so counts.

    Raises: DatabaseUnavailable.
    """
    if not instance_ids:
        return
    with database.begin() as connection:
        sql(
            connection,
            "UPDATE instances SET swept_at = clock_timestamp() WHERE id = ANY(:ids) AND swept_at IS NULL",
            {"ids": list(instance_ids)},
        )
