"""Defines the context of one attempt: its services, its progress, its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from app.agents.base import Agent, AgentReport
from app.environments.contract import Environment
from app.errors import MegaFlowError
from app.grading.base import Grade, Grader, HandedOver
from app.ledger import attempts
from app.ledger.attempts import Claim
from app.ledger.gradings import GradingClaim
from app.models.endings import EndReason
from app.models.model_calls import Account
from app.models.outcome import Artifact, Phase
from app.models.shell import Shell
from app.workers.command_logs import CommandLogs
from app.workers.evidence import Evidence
from app.workers.lease import StopToken
from app.workers.limit_account import LimitAccount
from app.workers.model_access import ModelAccess
from app.workers.retry import retrying
from app.workers.semaphores import LedgerSemaphore
from app.workers.services import WorkerServices
from app.workers.terminal import RecordedShell
from app.workers.usage_samples import UsageSeries

T = TypeVar("T")


@dataclass
class AttemptJournal:
    """Record of an attempt so far. It only grows; it is also read when the attempt ends with an error."""

    last_phase: Phase = Phase.CLAIMED
    teardown: dict[str, Any] = field(default_factory=dict)  # by purpose of the environment
    samples: dict[str, UsageSeries] = field(default_factory=dict)  # by purpose of the environment
    shells: list[str] = field(default_factory=list)  # users who had a shell in the agent's environment


@dataclass(frozen=True)
class AttemptContext:
    """Services and records of an attempt; the same objects from its claim to its end."""

    claimed: Claim
    services: WorkerServices
    token: StopToken
    scratch: Path
    semaphore: LedgerSemaphore
    logs: CommandLogs
    limits_met: LimitAccount
    evidence: Evidence = field(default_factory=Evidence)
    journal: AttemptJournal = field(default_factory=AttemptJournal)
    open: ExitStack = field(default_factory=ExitStack)  # closed when the outcome is recorded

    @classmethod
    def of(cls, claimed: Claim, services: WorkerServices, token: StopToken, scratch: Path) -> AttemptContext:
        """Returns the context of a claimed attempt."""
        semaphore = LedgerSemaphore(
            services.database,
            attempt_id=claimed.attempt_id,
            instance_id=claimed.instance_id,
            lease_s=services.settings.lease_s,
            stopped=token.is_set,
        )
        logs = CommandLogs(scratch / "command-logs", services.settings.command_log_bytes)
        limits_met = LimitAccount(claimed.spec.task.environment.resources)
        return cls(claimed, services, token, scratch, semaphore, logs, limits_met)

    @classmethod
    def of_grading(
        cls, claim: GradingClaim, services: WorkerServices, token: StopToken, scratch: Path
    ) -> AttemptContext:
        """Returns the context of a claimed grading; waits, limits and logs continue from the agent's worker."""
        claimed, result = claim.claimed, claim.result
        base = cls.of(claimed, services, token, scratch)
        base.semaphore.waited.update(claim.waits)
        earlier = result.command_log_count
        return replace(
            base,
            logs=CommandLogs(scratch / "command-logs", services.settings.command_log_bytes, earlier=earlier),
            limits_met=LimitAccount.resumed(claimed.spec.task.environment.resources, claim.environment),
            evidence=Evidence(
                scripted=claim.scripted, earlier_logs=result.command_logs, earlier_terminal=result.terminal
            ),
            journal=AttemptJournal(Phase.GRADING_STARTED, shells=list(claim.environment.get("shells", ()))),
        )

    @property
    def teardown(self) -> dict[str, Any]:
        """Description and costs of each environment, by its purpose."""
        return self.journal.teardown

    def recorded(self, shell: Shell, stage: str, after: Callable[[], None] = lambda: None) -> RecordedShell:
        """Returns the shell with its commands recorded under this stage. after: called when a command has ended."""
        return RecordedShell(self.evidence.terminal, stage, shell, after)

    def record_phase(self, phase: Phase, **environment: Any) -> None:
        """Records that a phase was reached. Raises: StaleWriter; Stopped: the attempt must stop."""
        waits, cost_usd = self.semaphore.waited, _cost(environment)
        self.write(attempts.record_phase, phase, environment=environment, waits=waits, cost_usd=cost_usd)
        self.journal.last_phase = phase
        self.raise_if_stopped()

    def write(self, verb: Callable[..., T], *values: Any, **named: Any) -> T:
        """Writes to the ledger; retries while it is unavailable: a restart of PostgreSQL must not lose an hour of work.

        A write that was applied although it returned an error is refused as stale on retry: the record stays.
        """
        retry = retrying(self.services.settings.lease_s)
        return retry(verb, self.services.database, self.claimed, *values, **named)

    def raise_if_stopped(self) -> None:
        """Raises: Stopped."""
        if self.token.reason is not None:
            raise Stopped(self.token.reason)


@dataclass(frozen=True)
class AttemptProgress:
    """Progress of an attempt. Each phase function of `app.workers.attempt` returns a changed copy."""

    context: AttemptContext
    grader: Grader
    agent_scope: ExitStack  # ends the agent's environment, if grading uses a separate one
    agent: Agent | None = None  # None: the agent has ended and this worker only grades
    environment: Environment | None = None
    base_commit: str | None = None
    model: ModelAccess | None = None
    report: AgentReport | None = None
    account: Account | None = None  # of the model calls
    patch: bytes | None = None
    handed_over: tuple[HandedOver, ...] = ()  # for a verifier in a separate environment
    grade: Grade | None = None
    artifacts: tuple[Artifact, ...] = ()

    @property
    def the_agent(self) -> Agent:
        """The agent; must not be used when this worker only grades."""
        assert self.agent is not None
        return self.agent

    @property
    def the_environment(self) -> Environment:
        """The environment; set by `provision`."""
        assert self.environment is not None
        return self.environment

    @property
    def the_report(self) -> AgentReport:
        """The agent's report; set by `act`."""
        assert self.report is not None
        return self.report


class Stopped(MegaFlowError):
    """The attempt must stop; `reason` is why."""

    def __init__(self, reason: EndReason) -> None:
        super().__init__(f"stopped: {reason.value}")
        self.reason = reason


def _cost(environment: Mapping[str, Any]) -> float | None:
    cost = environment.get("usage", {}).get("cost_usd")
    return None if cost is None else float(cost)
