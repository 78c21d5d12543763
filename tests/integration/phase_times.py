"""How long each phase of environments took, counted apart from the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from app.ledger.database import Database
from app.ledger.environment_times import SPANS, TOLD

_READY = "ready"
"""Pseudo-phase: all that the attempt waited from asking to the first command."""
_PHASES = (
    *("image", "pull", "build", "create", "start", "hand_out", "session", "set_up", "other"),
    *(_READY, "reset", "teardown"),
)
"""In the order in which they happen. `pull` and `build` are `image` again, of those for which that was done."""
_TABLE = """
    SELECT kind, path, phase, count(*) AS number,
        percentile_disc(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY took_s) AS spread
    FROM spans GROUP BY 1, 2, 3
"""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One phase of the environments of one kind that came by one path; seconds."""

    kind: str
    path: str
    phase: str
    count: int
    p50_s: float
    p95_s: float
    p99_s: float


def table(database: Database) -> list[PhaseTimes]:
    """Count and percentiles of every phase; by kind, path and the order of phases."""
    rows = database.sql(SPANS.format(chosen=TOLD) + _TABLE).all()
    found = [PhaseTimes(row.kind, row.path, row.phase, row.number, *row.spread) for row in rows]
    return sorted(found, key=lambda one: (one.kind, one.path, _place(one.phase)))


def _place(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)
