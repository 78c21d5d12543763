"""What the attack suite works with: an agent that attacks its own grading, carried through the real worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.agents.base import Agent, AgentJob, AgentReport
from app.agents.oracle import OracleAgent
from app.cli import regrade
from app.ledger import attempts, gradings, results
from app.ledger.accept import NewRun, accept
from app.ledger.database import Database
from app.ledger.gradings import GradingClaim
from app.models.endings import EndReason
from app.models.instance import InstanceMode
from app.models.outcome import TaskResult, Verdict, WakeUpMessage
from app.models.shell import CancelToken, Shell
from app.models.spec import AgentTask, Mode, TaskSpec
from app.settings import Settings
from app.workers import grader, services
from app.workers.attempt import carry_out
from app.workers.lease import StopToken
from app.workers.services import WorkerServices
from tests.building import RETRY, dispatched, ready_instance


@dataclass
class Attacker:
    """An agent that does what its test says; every command must succeed."""

    commands: Sequence[str]
    name: str = "attacker"
    version: str = "1"
    needs_model: bool = False
    needs_solution: bool = False
    output: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Always there."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        for command in self.commands:
            result = shell.run(command, timeout_s=60)
            self.output.append(result.text())
            assert result.ok, f"{command}: {result.text()}"
        return AgentReport(EndReason.SUBMITTED)


@dataclass(frozen=True)
class Range:
    """Where attacks run: settings, a ledger, and the worker's services in this process."""

    settings: Settings
    database: Database
    patch: pytest.MonkeyPatch

    def attempt(self, task: AgentTask, commands: Sequence[str]) -> TaskResult:
        """The result of one attempt at the task by an agent that runs these commands."""
        attacker: Agent = Attacker(commands)
        self.patch.setattr(WorkerServices, "agent", lambda this, name: OracleAgent() if name == "oracle" else attacker)
        spec = TaskSpec(task=task, agent="nop", mode=Mode.EPHEMERAL)
        (item,) = dispatched(self.database, accept(self.database, NewRun(specs=[spec])), Mode.EPHEMERAL)
        instance = ready_instance(self.database, Mode.EPHEMERAL)
        claim = attempts.claim(self.database, item.message, instance, lease_s=600)
        assert claim is not None
        here = services.build(self.settings, pooled=False, max_idle=0)
        here.retry = RETRY
        try:
            carry_out(claim, here, StopToken())
            while (grading := self._grading(item.message)) is not None:
                grader.carry_out(grading, here, StopToken())
        finally:
            here.close()
        (result,) = results.results(self.database, [claim.task_id])
        return result

    def verdict(self, task: AgentTask, *commands: str) -> Verdict:
        """Of one attempt."""
        result = self.attempt(task, commands)
        assert result.verdict is not None, result.attempt
        return result.verdict

    def _grading(self, message: WakeUpMessage) -> GradingClaim | None:
        """A grader's claim of what the attempt left; None: nothing waits for one."""
        return gradings.claim(self.database, message, ready_instance(self.database, InstanceMode.GRADING), lease_s=600)

    def regraded(self, *arguments: str) -> dict[str, Any]:
        """What `megaflow regrade latest` says."""
        self.patch.setattr("app.client.load", lambda: self.settings)
        cli = typer.Typer()
        cli.command()(regrade.regrade)
        done = CliRunner().invoke(cli, ["latest", *arguments, "--json"], catch_exceptions=False)
        return dict(json.loads(done.stdout[done.stdout.index("{\n") :]))  # behind the log's lines


def of_goal(task: AgentTask, **changes: Any) -> AgentTask:
    """The same task with a goal that differs."""
    return task.model_copy(update={"goal": task.goal.model_copy(update=changes)})


def folder_of(place: Path, files: dict[str, str]) -> Path:
    """A folder with these files."""
    for name, content in files.items():
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    return place
