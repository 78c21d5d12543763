"""The agent that does nothing. A task that it solves has tests that do not test it."""

from __future__ import annotations

from app.agents.base import AgentJob, AgentReport
from app.models.endings import EndReason
from app.models.shell import CancelToken, Shell


class NopAgent:
    """Submits at once. Every task must give it reward 0."""

    name = "nop"
    version = "1"
    needs_model = False
    needs_solution = False

    def check(self) -> None:
        """Always there."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        log = job.scratch / "agent.log"
        log.write_text("nop: did nothing\n")
        return AgentReport(EndReason.SUBMITTED, detail="did nothing", log=log, steps=0)
