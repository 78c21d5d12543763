"""Runs an agent described by a manifest; `result.json` says how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.agents.base import AgentJob
from app.agents.bridge_requests import PROTOCOL as BRIDGE_PROTOCOL
from app.agents.external import result
from app.agents.external.manifest import PROTOCOL, TOOL, Manifest
from app.agents.framework import AgentEnding, Ended, FrameworkBundle, FrameworkCommand, FrameworkPaths, Placement
from app.agents.installation import Installer, indexes
from app.agents.installation.once import digest_of, step
from app.models.endings import EndReason
from app.models.model_calls import Dialect
from app.models.shell import Shell

KEY_VARIABLE = "MEGAFLOW_MODEL_KEY"
JOB_VARIABLE = "MEGAFLOW_JOB"
_JOB = "job.json"


class ExternalFramework:
    """One manifest's agent. One object may serve any number of jobs at a time.

    `call_timeout_s` and `call_attempts` are what its calls of the model are asked to keep to.
    """

    def __init__(
        self, manifest: Manifest, installer: Installer, *, call_timeout_s: float = 480.0, call_attempts: int = 3
    ) -> None:
        self.manifest = manifest
        self.name: str = manifest.name
        self.version: str = manifest.version
        self.placement: Placement = manifest.placement
        self.dialect: Dialect = manifest.speaks
        self.needs_model: bool = manifest.needs_model
        self.endings: Mapping[str, EndReason] = result.ENDINGS
        self._installer = installer
        self._call_timeout_s = call_timeout_s
        self._call_attempts = call_attempts

    def install(self) -> FrameworkBundle:
        """Raises: AgentUnavailable: its own install command fails; with the end of what it said."""
        manifest = self.manifest
        if not manifest.install:
            return FrameworkBundle(self.name, manifest.folder)
        digest = digest_of(manifest.name, [manifest.version, json.dumps(manifest.install)])
        return FrameworkBundle(self.name, self._installer.ensure(self.name, digest, self._fill))

    def _fill(self, folder: Path) -> None:
        words = [word.replace(TOOL, str(folder)) for word in self.manifest.install]
        step(self.name, words, env=indexes.environment(), cwd=self.manifest.file.parent)

    def suits(self, shell: Shell) -> None:
        """Left to the adapter: it knows what it needs, and says so in its result."""

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        words = (word.replace(TOOL, place.tool) for word in self.manifest.argv)
        job_file = f"{place.home}/{_JOB}"
        env = {JOB_VARIABLE: job_file}
        if self.needs_model and place.model.api_key is not None:
            env[KEY_VARIABLE] = place.model.api_key.get_secret_value()
        told = json.dumps(self._job(job, place), ensure_ascii=False, indent=2).encode()
        return FrameworkCommand(argv=(*words, job_file), env=env, files={_JOB: told}, results=(result.RESULT,))

    def _job(self, job: AgentJob, place: FrameworkPaths) -> dict[str, Any]:
        limits, model = job.limits, place.model
        return {
            "protocol": PROTOCOL,
            "task": {"name": job.task_name, "description": job.description, "workdir": place.workdir},
            "limits": {
                "max_steps": limits.max_steps,
                "agent_timeout_s": limits.agent_timeout_s,
                "command_timeout_s": limits.command_timeout_s,
                "max_turn_tokens": limits.max_turn_tokens,
                "context_tokens": limits.context_tokens,
                "budget_usd": limits.budget_usd,
            },
            "model": {
                "name": model.name,
                "dialect": self.manifest.dialect,
                "openai_base_url": model.base_url,
                "anthropic_base_url": model.anthropic_url,
                "key_variable": KEY_VARIABLE,
                "call_timeout_s": self._call_timeout_s,
                "call_attempts": self._call_attempts,
            }
            if self.needs_model
            else None,
            "arguments": dict(job.arguments),
            "bridge": {"protocol": BRIDGE_PROTOCOL, "socket": place.bridge} if place.bridge else None,
            "home": place.home,
            "result": f"{place.home}/{result.RESULT}",
        }

    def ending(self, ended: Ended) -> AgentEnding:
        return result.ending(ended)
