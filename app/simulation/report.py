"""Reports a simulation: how long, how full, who waited, what was lost."""

from __future__ import annotations

from dataclasses import dataclass

from app.ledger.database import Database
from app.simulation import figures
from app.simulation.figures import Figures


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Everything that a simulation is asked for."""

    total: Figures
    users: dict[str, Figures]
    throughput: float
    """Tasks that ended, per second of the makespan."""
    utilisation: float
    """Share of the slots' time in which an attempt held them: 1.0 is all of `capacity` over the whole makespan."""
    peak: int
    """Attempts that ran at once, at most."""
    attempt_ends: dict[str, int]
    """End reasons of all attempts."""
    instances: dict[str, int]
    """Instances by state."""


def report(database: Database, capacity: int) -> SimulationReport:
    """All that the database holds, which must be the simulation's own."""
    found = figures.read(database)
    total = found.total
    return SimulationReport(
        total=total,
        users=found.users,
        throughput=total.ended / total.makespan_s if total.makespan_s else 0.0,
        utilisation=found.busy_s / (capacity * total.makespan_s) if total.makespan_s else 0.0,
        peak=found.peak,
        attempt_ends=found.attempt_ends,
        instances=found.instances,
    )
