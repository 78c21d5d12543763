"""Runs an agent described by a manifest; its `result.json` gives the end reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.agents.base import AgentJob
from app.agents.bridge import PROTOCOL as BRIDGE_PROTOCOL
from app.agents.external.manifest import PROTOCOL, TOOL, Manifest
from app.agents.framework import AgentEnding, Ended, FrameworkBundle, FrameworkCommand, FrameworkPaths, Placement
from app.agents.installation import Installer, indexes
from app.agents.installation.once import digest_of, step
from app.errors import explained
from app.models.endings import EndReason
from app.models.model_calls import Dialect
from app.models.shell import Shell

RESULT = "result.json"
NO_RESULT = "no result.json"
BAD_RESULT = "a result.json that is none"
KILLED = "killed"

MAY_SAY = (
    EndReason.SUBMITTED,
    EndReason.STEP_LIMIT,
    EndReason.CONTEXT_EXHAUSTED,
    EndReason.BUDGET_EXHAUSTED,
    EndReason.AGENT_TIMEOUT,
    EndReason.AGENT_ERROR,
    EndReason.MODEL_ERROR,
)
"""End reasons that an adapter may report. It cannot know others: that its worker was lost, or a cancel."""

ENDINGS: Mapping[str, EndReason] = {
    **{reason.value: reason for reason in MAY_SAY},
    NO_RESULT: EndReason.AGENT_ERROR,
    BAD_RESULT: EndReason.AGENT_ERROR,
    KILLED: EndReason.INFRASTRUCTURE,  # not by us: out of memory, a shutdown
}

_LONGEST_BYTES = 1 << 20
_DETAIL_CHARS = 2000
_CountName = Annotated[str, Field(max_length=64, pattern=r"^[ -~]+$")]
_Count = Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False)]


class Result(BaseModel):
    """Allowed content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    protocol: Literal["megaflow-agent/1"]
    end_reason: str
    detail: str = ""
    steps: int | None = Field(default=None, ge=0, lt=1 << 31)
    usage: dict[_CountName, _Count] = Field(default={}, max_length=64)

    @field_validator("end_reason")
    @classmethod
    def _may_be_said(cls, value: str) -> str:
        if value not in {reason.value for reason in MAY_SAY}:
            raise ValueError(f"expected one of {', '.join(MAY_SAY)}; found {value!r:.80}")
        return value


def ending(ended: Ended) -> AgentEnding:
    """Reads the result file in the adapter's home; any error in it is the adapter's error."""
    file = ended.home / RESULT
    if file.is_symlink() or not file.is_file():
        word = KILLED if ended.returncode < 0 else NO_RESULT
        why = f"expected {RESULT} in its home; found none, and exit code {ended.returncode}: {ended.last_words()}"
        return AgentEnding(ENDINGS[word], why)
    with file.open("rb") as stream:
        content = stream.read(_LONGEST_BYTES + 1)
    try:
        if len(content) > _LONGEST_BYTES:
            raise ValueError(f"expected at most {_LONGEST_BYTES} bytes; found more")
        report = Result.model_validate_json(content)
    except ValueError as error:
        why = f"{RESULT}: {_faults(error)}; it ended with exit code {ended.returncode}"
        return AgentEnding(ENDINGS[BAD_RESULT], why)
    return AgentEnding(EndReason(report.end_reason), report.detail[:_DETAIL_CHARS], report.steps, report.usage)


def _faults(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    each = (f"{'.'.join(map(str, one['loc']))}: {explained(one)}; found {one['input']!r:.80}" for one in error.errors())
    return "; ".join(each)[:_DETAIL_CHARS]


KEY_VARIABLE = "MEGAFLOW_MODEL_KEY"
JOB_VARIABLE = "MEGAFLOW_JOB"
_JOB = "job.json"


class ExternalFramework:
    """The agent of one manifest. One object may serve any number of jobs at a time.

    `call_timeout_s` and `call_attempts` are requested limits for its model calls.
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
        self.endings: Mapping[str, EndReason] = ENDINGS
        self._installer = installer
        self._call_timeout_s = call_timeout_s
        self._call_attempts = call_attempts

    def install(self) -> FrameworkBundle:
        """Raises: AgentUnavailable: its own install command fails; with the end of its output."""
        manifest = self.manifest
        if not manifest.install:
            return FrameworkBundle(self.name, manifest.folder)
        digest = digest_of(manifest.name, [manifest.version, json.dumps(manifest.install)])
        return FrameworkBundle(self.name, self._installer.ensure(self.name, digest, self._fill))

    def _fill(self, folder: Path) -> None:
        words = [word.replace(TOOL, str(folder)) for word in self.manifest.install]
        step(self.name, words, env=indexes.environment(), cwd=self.manifest.file.parent)

    def suits(self, shell: Shell) -> None:
        """Does nothing: the adapter checks its own requirements and reports them in its result."""

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        words = (word.replace(TOOL, place.tool) for word in self.manifest.argv)
        job_file = f"{place.home}/{_JOB}"
        env = {JOB_VARIABLE: job_file}
        if self.needs_model and place.model.api_key is not None:
            env[KEY_VARIABLE] = place.model.api_key.get_secret_value()
        job_json = json.dumps(self._job(job, place), ensure_ascii=False, indent=2).encode()
        return FrameworkCommand(argv=(*words, job_file), env=env, files={_JOB: job_json}, results=(RESULT,))

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
            "result": f"{place.home}/{RESULT}",
        }

    def ending(self, ended: Ended) -> AgentEnding:
        return ending(ended)
