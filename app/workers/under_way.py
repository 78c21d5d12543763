"""One attempt under way: what its stations know of it, and what they have told the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.agents.base import AgentReport
from app.errors import MegaFlowError
from app.ledger import attempts
from app.ledger.attempts import Claim
from app.models.endings import EndReason
from app.models.outcome import Phase
from app.workers.command_logs import CommandLogs
from app.workers.evidence import Evidence
from app.workers.gates import LedgerGate
from app.workers.lease import StopToken
from app.workers.limit_account import LimitAccount
from app.workers.model_access import ModelAccess
from app.workers.patience import patient
from app.workers.stations import Stations


@dataclass
class Rollout:
    """One attempt under way."""

    claimed: Claim
    stations: Stations
    token: StopToken
    scratch: Path
    last_phase: Phase = Phase.CLAIMED
    evidence: Evidence = field(default_factory=Evidence)
    report: AgentReport | None = None
    model: ModelAccess | None = None
    torn: dict[str, Any] = field(default_factory=dict)
    open: ExitStack = field(default_factory=ExitStack)
    gate: LedgerGate = field(init=False)
    logs: CommandLogs = field(init=False)
    limits_met: LimitAccount = field(init=False)

    def __post_init__(self) -> None:
        self.logs = CommandLogs(self.scratch / "command-logs", self.stations.settings.command_log_bytes)
        self.limits_met = LimitAccount(self.claimed.spec.task.environment.resources)
        self.gate = LedgerGate(
            self.stations.database,
            attempt_id=self.claimed.attempt_id,
            instance_id=self.claimed.instance_id,
            lease_s=self.stations.settings.lease_s,
            stopped=self.token.is_set,
        )

    def passed(self, phase: Phase, **environment: Any) -> None:
        """Record a door, and stop here if the attempt must. Raises: StaleWriter, Stopped."""
        self.write(
            attempts.record_phase, phase, environment=environment, waits=self.gate.waited, cost_usd=_cost(environment)
        )
        self.last_phase = phase
        self.heed()

    def write(self, verb: Callable[..., None], *values: Any, **named: Any) -> None:
        """Write to the ledger, patiently: a restart of PostgreSQL must not cost the work of an hour.

        A write that was applied although we saw an error is refused as stale the second time: the record stands.
        """
        patiently = patient(self.stations.settings.lease_s)
        patiently(verb, self.stations.database, self.claimed, *values, **named)

    def heed(self) -> None:
        """Raises: Stopped."""
        if self.token.reason is not None:
            raise Stopped(self.token.reason)


class Stopped(MegaFlowError):
    """Somebody told the attempt to stop."""

    def __init__(self, reason: EndReason) -> None:
        super().__init__(f"stopped: {reason.value}")
        self.reason = reason


def _cost(environment: Mapping[str, Any]) -> float | None:
    """US dollars that the agent's model calls took, when it says so."""
    cost = environment.get("usage", {}).get("cost_usd")
    return None if cost is None else float(cost)
