"""Runs the OpenHands SDK, unmodified, inside the environment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.agents.adapter import BASHRC, USERS_OWN, PinnedAdapter, bashrc
from app.agents.base import AgentJob
from app.agents.framework import AgentEnding, Ended, FrameworkBundle, FrameworkCommand, FrameworkPaths, Placement
from app.agents.stream_json import read_object, short, tail
from app.models.endings import EndReason
from app.models.model_calls import Dialect

_HERE = Path(__file__).parent
_DRIVER = "drive.py"
_RESULT = "result.json"
_LOCK = _HERE / "requirements.lock"
_FIRST_USE = (
    "-c",
    "import openhands.sdk.conversation.impl.local_conversation, openhands.tools.terminal, "
    "openhands.tools.file_editor, openhands.tools.task_tracker",
)

# No banner, no download of price or model lists, no telemetry, no .env file read.
_QUIET: Mapping[str, str] = {
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",
    "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
    "HF_HUB_OFFLINE": "1",
}

_PLAIN_SHELL = f"{USERS_OWN}\nbind 'set enable-bracketed-paste off' 2>/dev/null"
"""Start-up lines of a shell whose terminal shows the model all of bash's output, even marks around typed text."""

# Meaning of the driver's `status` and the last error's `code`; the exit code only shows that they were written.
ENDINGS: Mapping[str, EndReason] = {
    "finished": EndReason.SUBMITTED,  # the finish tool, or words without a tool
    "stuck": EndReason.AGENT_ERROR,  # it repeated itself
    "error: MaxIterationsReached": EndReason.STEP_LIMIT,
    "error: MaxBudgetReached": EndReason.BUDGET_EXHAUSTED,
    "error: LLMContextWindowExceedError": EndReason.CONTEXT_EXHAUSTED,
    "error: LLMAuthenticationError": EndReason.MODEL_ERROR,
    "error: LLMBadRequestError": EndReason.MODEL_ERROR,
    "error: LLMContextWindowTooSmallError": EndReason.MODEL_ERROR,
    "error: LLMNoResponseError": EndReason.MODEL_ERROR,
    "error: LLMRateLimitError": EndReason.MODEL_ERROR,
    "error: LLMServiceUnavailableError": EndReason.MODEL_ERROR,
    "error: LLMTimeoutError": EndReason.MODEL_ERROR,
    "error": EndReason.AGENT_ERROR,  # any other code: an exception of the framework
    "no result": EndReason.AGENT_ERROR,  # the driver or its Python broke
}


class OpenHands(PinnedAdapter):
    """Adapter of the OpenHands SDK."""

    name = "openhands"
    version = "1.58.0"
    placement = Placement.INSIDE
    dialect = Dialect.CHAT
    endings = ENDINGS

    def install(self) -> FrameworkBundle:
        """Raises: AgentUnavailable."""
        return self._installer.python(self.name, _LOCK, first_use=_FIRST_USE, first_use_env=_QUIET)

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        """Returns the driver's command in OpenHands' Python; the job is in a file, because a task may be long."""
        env = {
            **_QUIET,
            "HOME": place.home,
            "TMUX_TMPDIR": place.home,  # if there is a tmux: a server only for this attempt
            "OPENAI_API_KEY": place.model.key_text,
        }
        return FrameworkCommand(
            argv=(f"{place.tool}/bin/python3", "-B", f"{place.home}/{_DRIVER}", f"{place.home}/job.json"),
            env=env,
            files={
                _DRIVER: (_HERE / _DRIVER).read_bytes(),
                "job.json": json.dumps(self._config(job, place), indent=1).encode(),
                BASHRC: bashrc(env.keys() - {"HOME"}, last=_PLAIN_SHELL),
            },
            results=(_RESULT,),
        )

    def _config(self, job: AgentJob, place: FrameworkPaths) -> dict[str, Any]:
        return {
            "task": job.description,
            "model": place.model.name,
            "base_url": place.model.base_url,
            "max_iterations": job.limits.max_steps,
            "command_timeout_s": job.limits.command_timeout_s,
            "call_timeout_s": math.ceil(self._call_timeout_s),
            "call_attempts": self._call_attempts,
        }

    def ending(self, ended: Ended) -> AgentEnding:
        """Reads the driver's result; without one, uses the end of the output."""
        report = read_object(ended.home / _RESULT)
        if not report:
            output = tail(ended.stderr) or tail(ended.stdout)
            problem = f"expected result.json; found none, and exit code {ended.returncode}: {output}"
            return AgentEnding(ENDINGS["no result"], problem)
        status, code = str(report.get("status")), report.get("error")
        word = f"{status}: {code}" if status == "error" and code else status
        reason = ENDINGS.get(word, ENDINGS.get(status, EndReason.AGENT_ERROR))
        detail = "" if reason is EndReason.SUBMITTED else short(f"{word}: {report.get('detail') or ''}".rstrip(": "))
        return AgentEnding(reason, detail, report.get("steps"))
