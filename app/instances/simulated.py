"""The `simulated` provider: thousands of instances in one process, which pretend to work.

Its host is `python -m app.simulation.host`; what its instances do is a `Simulation`. Meant for benchmarks, chaos and
capacity planning (`megaflow simulate`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from app.errors import InstanceFailed
from app.instances.process import ProcessProvider
from app.models.simulation import Simulation
from app.settings import Settings


def socket_path(settings: Settings) -> Path:
    """Returns the socket on which the simulation's host listens."""
    return settings.home / "run" / "simulator.sock"


class SimulatedProvider(ProcessProvider):
    """Calls the simulation's host as `process` calls the worker launcher. The handle is a number of the host's."""

    name: ClassVar[str] = "simulated"
    _host: ClassVar[str] = "the simulation's host"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._path = socket_path(settings)

    def counts(self) -> dict[str, float]:
        """Returns the host's counts (`claimed`, `finished`, …) and what its writes took. Raises: InstanceFailed."""
        return self._ask({"verb": "counts"})

    def behave(self, simulation: Simulation) -> None:
        """Applies `simulation` to all instances and attempts that begin from now on. Raises: InstanceFailed."""
        self._ask({"verb": "behave", "simulation": simulation.model_dump(mode="json")})

    def _ask(self, message: dict[str, Any], *, unclear: type[InstanceFailed] = InstanceFailed) -> dict[str, Any]:
        reply = super()._ask(message, unclear=unclear)
        if "refusal" in reply:
            raise InstanceFailed(f"the simulated provider refused to {message['verb']}: {reply['refusal']}")
        return reply
