"""An external agent as the spine knows it: like every framework, but it may do without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from app.agents.base import AgentJob, AgentReport, ModelEndpoint
from app.agents.external.framework import ExternalFramework
from app.agents.running import FrameworkAgent
from app.models.shell import CancelToken, Shell

_NO_MODEL = ModelEndpoint("", "")


class ExternalAgent(FrameworkAgent):
    """Runs one manifest's adapter. One object may run any number of jobs at a time."""

    def __init__(self, framework: ExternalFramework, *, process_env: Mapping[str, str] | None = None) -> None:
        super().__init__(framework, process_env=process_env)
        self.needs_model = framework.needs_model

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        """Raises: as `FrameworkAgent.run`."""
        if not self.needs_model:
            job = replace(job, model=_NO_MODEL, model_inside_url="")
        return super().run(job, shell, cancel)
