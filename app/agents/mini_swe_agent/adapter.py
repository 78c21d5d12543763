"""Runs mini-swe-agent, unmodified, as a process on the worker; its commands go over the bridge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.agents.adapter import PinnedAdapter
from app.agents.base import AgentJob
from app.agents.framework import AgentEnding, Ended, FrameworkBundle, FrameworkCommand, FrameworkPaths, Placement
from app.models.endings import EndReason
from app.models.model_calls import Dialect
from app.models.shell import Shell

_HERE = Path(__file__).parent
_PLUGIN = "megaflow_environment.py"
_LOCK = _HERE / "requirements.lock"
_FIRST_USE = ("-c", "import minisweagent.run.mini, minisweagent.models.litellm_model")
_TRAJECTORY = "mini.traj.json"
_TEXT_BASED = "mini_textbased"
"""Configuration whose commands are in the model's text; it does not name the model class that reads them."""
_DETAIL_CHARS = 600
_LONGEST_TRAJECTORY_BYTES = 512 << 20

# In every process of the framework: no set-up dialogue, no banner, no price list download, no .env file.
_QUIET: Mapping[str, str] = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
    "HF_HUB_OFFLINE": "1",
}

KILLED = "killed"
CRASHED = "no finished trajectory"
OTHER = "any other exception"

_MODEL_ERRORS = (
    *("APIConnectionError", "APIError", "APIResponseValidationError", "AuthenticationError", "BadGatewayError"),
    *("BadRequestError", "BudgetExceededError", "ContentPolicyViolationError", "InternalServerError"),
    *("InvalidRequestError", "JSONSchemaValidationError", "MidStreamFallbackError", "NotFoundError"),
    *("OpenAIError", "PermissionDeniedError", "RateLimitError", "RejectedRequestError"),
    *("ServiceUnavailableError", "Timeout", "UnprocessableEntityError", "UnsupportedParamsError"),
)
"""Exceptions of litellm."""

# Meaning of the trajectory's `info.exit_status`: names of mini-swe-agent's own endings, and of exception classes
# (litellm's, ours) that ended it. The exit code is not used: it is 0 for most failures. Without that status the ending
# is CRASHED or KILLED.
ENDINGS: Mapping[str, EndReason] = {
    "Submitted": EndReason.SUBMITTED,
    "LimitsExceeded": EndReason.STEP_LIMIT,  # the cost limit is off
    "TimeExceeded": EndReason.AGENT_TIMEOUT,
    "RepeatedFormatError": EndReason.AGENT_ERROR,
    "UserInterruption": EndReason.AGENT_ERROR,  # there is no user to interrupt it
    "ContextWindowExceededError": EndReason.CONTEXT_EXHAUSTED,
    "EnvironmentLost": EndReason.ENVIRONMENT_ERROR,
    **dict.fromkeys(_MODEL_ERRORS, EndReason.MODEL_ERROR),
    OTHER: EndReason.AGENT_ERROR,
    CRASHED: EndReason.AGENT_ERROR,
    KILLED: EndReason.INFRASTRUCTURE,  # not by us: out of memory, a shutdown; never caused by the model
}


class MiniSweAgent(PinnedAdapter):
    """Adapter of mini-swe-agent. Attempts of one model call are 4 to 60 s apart: the framework's own waits."""

    name = "mini-swe-agent"
    version = "2.4.6"
    placement = Placement.OUTSIDE
    dialect = Dialect.CHAT
    endings = ENDINGS

    def install(self) -> FrameworkBundle:
        """Raises: AgentUnavailable."""
        return self._installer.venv(self.name, _LOCK, first_use=_FIRST_USE, first_use_env=_QUIET)

    def suits(self, shell: Shell) -> None:
        """Does nothing: every environment is suitable, since only commands run there."""

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        """Returns its command. The task's text is in a file: it may be too long for an argument, and not private."""
        base = job.arguments.get("config", "mini")
        configuration = yaml.safe_dump(self._configuration(job, place)).encode()
        return FrameworkCommand(
            argv=(
                f"{place.tool}/bin/mini",
                "-c",
                f"{base}.yaml",
                "-c",
                "job.yaml",
                "-o",
                f"{place.home}/{_TRAJECTORY}",
            ),
            env=self._environ(place),
            # The plugin has its own folder: nothing else becomes importable by it.
            files={"job.yaml": configuration, f"plugin/{_PLUGIN}": (_HERE / _PLUGIN).read_bytes()},
        )

    def ending(self, ended: Ended) -> AgentEnding:
        trajectory = _read(ended.home / _TRAJECTORY)
        word, detail = _word(ended, trajectory)
        stats = trajectory.get("info", {}).get("model_stats", {})
        calls = stats.get("api_calls") if isinstance(stats, dict) else None
        return AgentEnding(ENDINGS.get(word, ENDINGS[OTHER]), detail, calls if isinstance(calls, int) else None)

    def _configuration(self, job: AgentJob, place: FrameworkPaths) -> dict[str, Any]:
        """Returns settings that override the framework's `mini.yaml` or `mini_textbased.yaml`.

        Not its `swebench.yaml`: that one expects a folder /testbed and makes the model leave a patch.txt in the
        repository, which would become part of our own patch.
        """
        limits = job.limits
        return {
            "run": {"task": job.description},
            "agent": {
                "mode": "yolo",
                "confirm_exit": False,
                "step_limit": limits.max_steps,
                "cost_limit": 0,
                "wall_time_limit_seconds": 0,  # checked by MegaFlow: it does not know the waiting time of limits
            },
            "model": {
                **({"model_class": "litellm_textbased"} if job.arguments.get("config") == _TEXT_BASED else {}),
                "model_name": f"openai/{place.model.name}",
                "cost_tracking": "ignore_errors",
                # The client's own retries are off: the framework's are counted and logged.
                "model_kwargs": {"timeout": self._call_timeout_s, "max_retries": 0},
            },
            "environment": {
                "environment_class": "megaflow_environment.MegaFlowEnvironment",
                "cwd": place.workdir,
                "timeout": max(1, int(limits.command_timeout_s)),
                # No BASH_ENV, unlike the framework's swebench.yaml: the dataset's own environment activates the Python
                # of an official image for every agent, and a host's file would write into the output.
                "env": {},
            },
        }

    def _environ(self, place: FrameworkPaths) -> dict[str, str]:
        """Returns the process's variables, in addition to those of every framework; the key is only here."""
        return {
            **_QUIET,
            "TERM": "dumb",
            "COLUMNS": "160",
            "NO_COLOR": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": f"{place.home}/plugin",
            "MEGAFLOW_BRIDGE": place.bridge or "",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{place.home}/mswea",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(self._call_attempts),
            "OPENAI_API_BASE": place.model.base_url,
            "OPENAI_API_KEY": place.model.key_text,
        }


def _word(ended: Ended, told: dict[str, Any]) -> tuple[str, str]:
    if status := told.get("info", {}).get("exit_status"):
        return str(status), _detail(str(status), told)
    output = ended.last_words()
    problem = f"expected a finished trajectory; found exit code {ended.returncode} and none: {output}"
    return (KILLED if ended.returncode < 0 else CRASHED), problem


def _detail(status: str, told: dict[str, Any]) -> str:
    if status == "Submitted":
        return ""
    last = (told.get("messages") or [{}])[-1].get("extra", {})
    return f"{status}: {last.get('exception_str', '')}".rstrip(": ")[:_DETAIL_CHARS]


def _read(trajectory: Path) -> dict[str, Any]:
    try:
        if trajectory.stat().st_size > _LONGEST_TRAJECTORY_BYTES:
            return {}
        content = json.loads(trajectory.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("info"), dict) else {}
