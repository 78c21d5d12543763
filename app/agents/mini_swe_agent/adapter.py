"""mini-swe-agent, unmodified, as a process on the worker that acts in the task's environment over the bridge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import structlog
import yaml

from app.agents.base import AgentJob, AgentReport, ModelEndpoint
from app.agents.bridge import Bridge, serve
from app.agents.installation import ensure
from app.agents.mini_swe_agent.process import Ended, Stop, run_group
from app.errors import AgentFailed
from app.models.endings import EndReason
from app.models.shell import CancelToken, Shell

log = structlog.get_logger(__name__)

_HERE = Path(__file__).parent
_PLUGIN = "megaflow_environment.py"
_LOCK = _HERE / "requirements.lock"
_FIRST_USE = ("-c", "import minisweagent.run.mini, minisweagent.models.litellm_model")
_SHORTEST_SECRET = 8  # a shorter key is a placeholder, and replacing it would spoil ordinary text
_DETAIL_CHARS = 600

# In every process of the framework: no set-up dialogue, no banner, no price list fetched, no .env file looked for.
_QUIET: Mapping[str, str] = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
    "HF_HUB_OFFLINE": "1",
}

# What the trajectory's `info.exit_status` means: names of mini-swe-agent's own endings, and of the exception classes
# (litellm's, ours) that ended it. The exit code says nothing: it is 0 for most failures.
END_REASONS: Mapping[str, EndReason] = {
    "Submitted": EndReason.SUBMITTED,
    "LimitsExceeded": EndReason.STEP_LIMIT,  # the cost limit is off
    "TimeExceeded": EndReason.AGENT_TIMEOUT,
    "RepeatedFormatError": EndReason.AGENT_ERROR,
    "ContextWindowExceededError": EndReason.CONTEXT_EXHAUSTED,
    "EnvironmentLost": EndReason.ENVIRONMENT_ERROR,
    "APIConnectionError": EndReason.MODEL_ERROR,
    "APIError": EndReason.MODEL_ERROR,
    "APIResponseValidationError": EndReason.MODEL_ERROR,
    "AuthenticationError": EndReason.MODEL_ERROR,
    "BadGatewayError": EndReason.MODEL_ERROR,
    "BadRequestError": EndReason.MODEL_ERROR,
    "BudgetExceededError": EndReason.MODEL_ERROR,
    "ContentPolicyViolationError": EndReason.MODEL_ERROR,
    "InternalServerError": EndReason.MODEL_ERROR,
    "NotFoundError": EndReason.MODEL_ERROR,
    "OpenAIError": EndReason.MODEL_ERROR,
    "PermissionDeniedError": EndReason.MODEL_ERROR,
    "RateLimitError": EndReason.MODEL_ERROR,
    "ServiceUnavailableError": EndReason.MODEL_ERROR,
    "Timeout": EndReason.MODEL_ERROR,
    "UnprocessableEntityError": EndReason.MODEL_ERROR,
    "UnsupportedParamsError": EndReason.MODEL_ERROR,
}


class MiniSweAgent:
    """The adapter. One object may run any number of jobs at a time.

    `model_attempts` are the tries of one model call, 4 to 60 s apart (the framework's own waits); `process_env` are
    further variables for the agent's process, such as SSL_CERT_FILE or HTTPS_PROXY on the way to a provider.
    """

    name: ClassVar[str] = "mini-swe-agent"
    version: ClassVar[str] = "2.4.6"
    needs_model: ClassVar[bool] = True
    needs_solution: ClassVar[bool] = False

    def __init__(
        self,
        tools_dir: Path,
        *,
        model_timeout_s: float = 120.0,
        model_attempts: int = 5,
        process_env: Mapping[str, str] | None = None,
    ) -> None:
        self._tools_dir = tools_dir
        self._model_timeout_s = model_timeout_s
        self._model_attempts = model_attempts
        self._process_env = dict(process_env or {})

    def check(self) -> None:
        """Install the framework if it is not there.

        Raises: AgentUnavailable.
        """
        self._venv()

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        """Let mini-swe-agent work on `job`; its trajectory and log are left in the job's scratch folder.

        Raises: EnvironmentFailed, or what else the shell raised; AgentFailed: the job names no model, or the
        framework cannot be started; AgentUnavailable: it cannot be installed.
        """
        if job.model is None:
            raise AgentFailed(f"agent {self.name}: expected a model for task {job.task_name!r}; found none; name one")
        venv = self._venv()
        scratch = job.scratch.absolute()
        trajectory, output = scratch / "mini.traj.json", scratch / "mini.log"
        self._prepare(job, job.model)
        with serve(shell, default_timeout_s=job.limits.command_timeout_s) as bridge:
            try:
                ended = run_group(
                    [str(venv / "bin" / "mini"), "-c", "mini.yaml", "-c", "job.yaml", "-o", str(trajectory)],
                    env=self._environ(venv, scratch, job.model, bridge),
                    cwd=scratch,
                    log=output,
                    timeout_s=job.limits.agent_timeout_s,
                    cancel=cancel,
                )
            except OSError as error:
                raise AgentFailed(f"agent {self.name}: expected to start {venv}/bin/mini; found {error}") from error
        _blot(job.model, trajectory, output)
        if bridge.fault is not None and ended.by is Stop.ITSELF:
            raise bridge.fault
        return _report(ended, trajectory, output)

    def _venv(self) -> Path:
        return ensure(self._tools_dir, self.name, _LOCK, first_use=_FIRST_USE, first_use_env=_QUIET)

    def _prepare(self, job: AgentJob, model: ModelEndpoint) -> None:
        """Write the job's configuration, and the plugin in a folder of its own: nothing else becomes importable."""
        plugins = job.scratch / "plugin"
        plugins.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_HERE / _PLUGIN, plugins / _PLUGIN)
        # A file and not an argument: a task's text may be longer than an argument may be, and arguments are public.
        (job.scratch / "job.yaml").write_text(yaml.safe_dump(self._configuration(job, model)), encoding="utf-8")

    def _configuration(self, job: AgentJob, model: ModelEndpoint) -> dict[str, Any]:
        """What is laid over the framework's `mini.yaml`.

        Not its `swebench.yaml`: that one is about a folder /testbed and has the model leave a patch.txt in the
        repository, where the patch that we take ourselves would pick it up.
        """
        limits = job.limits
        return {
            "run": {"task": job.description},
            "agent": {
                "mode": "yolo",
                "confirm_exit": False,
                "step_limit": limits.max_steps,
                "cost_limit": 0,
                "wall_time_limit_seconds": max(1, int(limits.agent_timeout_s)),
            },
            "model": {
                "model_name": f"openai/{model.name}",
                "cost_tracking": "ignore_errors",
                # The client's own retries are off: the framework's are the ones that are counted and logged.
                "model_kwargs": {"timeout": self._model_timeout_s, "max_retries": 0},
            },
            "environment": {
                "environment_class": "megaflow_environment.MegaFlowEnvironment",
                "cwd": job.workdir,
                "timeout": max(1, int(limits.command_timeout_s)),
                # No BASH_ENV, as the framework's swebench.yaml has it: the dataset's own environment activates the
                # Python of an official image for every agent alike, and a host's file would speak into the output.
                "env": {},
            },
        }

    def _environ(self, venv: Path, scratch: Path, model: ModelEndpoint, bridge: Bridge) -> dict[str, str]:
        """All that the process sees of the world; the key is here and nowhere else."""
        return {
            **self._process_env,
            **_QUIET,
            "PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(scratch),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "COLUMNS": "160",
            "NO_COLOR": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(scratch / "plugin"),
            "MEGAFLOW_BRIDGE": str(bridge.address),
            "MSWEA_GLOBAL_CONFIG_DIR": str(scratch / "mswea"),
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(self._model_attempts),
            "OPENAI_API_BASE": model.base_url,
            "OPENAI_API_KEY": model.api_key.get_secret_value() if model.api_key else "none",
        }


def _blot(model: ModelEndpoint, *files: Path) -> None:
    """Remove the key from what is kept: an endpoint that refuses a key may quote it, and the error is recorded."""
    secret = model.api_key.get_secret_value().encode() if model.api_key else b""
    if len(secret) < _SHORTEST_SECRET:
        return
    for file in files:
        if file.exists() and secret in (content := file.read_bytes()):
            file.write_bytes(content.replace(secret, b"[api key]"))


def _report(ended: Ended, trajectory: Path, output: Path) -> AgentReport:
    told = _read(trajectory)
    reason, detail = _ending(ended, told, output)
    stats = told.get("info", {}).get("model_stats", {})
    log.info("agent.ended", agent=MiniSweAgent.name, reason=reason.value, returncode=ended.returncode)
    return AgentReport(
        end_reason=reason,
        detail=detail,
        trajectory=trajectory if told else None,
        log=output,
        steps=stats.get("api_calls"),
        usage=_usage(told),
    )


def _ending(ended: Ended, told: dict[str, Any], output: Path) -> tuple[EndReason, str]:
    if ended.by is Stop.CANCEL:
        return EndReason.CANCELLED, "stopped on request"
    if ended.by is Stop.TIMEOUT:
        return EndReason.AGENT_TIMEOUT, "still working when its time was up"
    if status := told.get("info", {}).get("exit_status"):
        return END_REASONS.get(status, EndReason.AGENT_ERROR), _detail(status, told)
    found = f"expected a finished trajectory; found exit code {ended.returncode} and none: {_tail(output)}"
    # A signal that is not ours is the host's doing (out of memory, a shutdown), never the model's.
    return (EndReason.INFRASTRUCTURE if ended.returncode < 0 else EndReason.AGENT_ERROR), found


def _detail(status: str, told: dict[str, Any]) -> str:
    if status == "Submitted":
        return ""
    last = (told.get("messages") or [{}])[-1].get("extra", {})
    return f"{status}: {last.get('exception_str', '')}".rstrip(": ")[:_DETAIL_CHARS]


def _read(trajectory: Path) -> dict[str, Any]:
    """The trajectory, or nothing when there is none or its writing was cut short."""
    try:
        told = json.loads(trajectory.read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _usage(told: dict[str, Any]) -> dict[str, float]:
    """Tokens summed over the calls that were answered; empty when the endpoint reports none."""
    totals: dict[str, float] = {}
    for message in told.get("messages", []):
        response = message.get("extra", {}).get("response")
        reported = response.get("usage") if isinstance(response, dict) else None
        for key in ("prompt_tokens", "completion_tokens"):
            if isinstance(count := (reported or {}).get(key), int | float):
                totals[key] = totals.get(key, 0.0) + count
    return totals


def _tail(output: Path) -> str:
    return output.read_bytes()[-_DETAIL_CHARS:].decode("utf-8", "replace").strip()
