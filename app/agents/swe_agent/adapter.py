"""Runs SWE-agent, unmodified, from a checkout, inside the environment."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.agents.adapter import BASHRC, PinnedAdapter, bashrc
from app.agents.base import AgentJob
from app.agents.framework import AgentEnding, Ended, FrameworkBundle, FrameworkCommand, FrameworkPaths, Placement
from app.agents.installation import Installer
from app.agents.installation.checkouts import version_of
from app.agents.stream_json import read_object, short, tail
from app.errors import AgentNotSetUp, AgentUnsuitable
from app.models.endings import EndReason
from app.models.model_calls import Dialect
from app.models.shell import Shell
from app.models.spec import Limits

_LOCK = Path(__file__).with_name("requirements.lock")
_MAIN = "import sys; from sweagent.run.run import main; sys.exit(main())"
# Starts in the task's folder, wherever it is here: SWE-agent changes to `/NAME`. It reads a .env file where it starts.
_START = 'folder=${PWD#/}; cd "$HOME" && exec "$@" --env.repo.repo_name="$folder"'
_FIRST_USE = ("-c", "import sweagent.run.run_single")
_ROOT = "/root"  # SWE-agent writes its tools and its patch there, whatever its user's home is
_LOOK_S = 30.0
_PROMPT = "PS1=SHELLPS1PREFIX"
"""Prompt that its shell (swe-rex) waits for, for one second, before it reads the user's own start-up file. The early
prompt gives that file more time (conda needs about a second)."""
_ID = "task"  # of the problem: names the folder and the output files
_TRAJECTORY = f"output/{_ID}/{_ID}.traj"

# Only warnings on the terminal, the rest in its own log files; no price list download, no .env file of a model library.
_QUIET: Mapping[str, str] = {
    "SWE_AGENT_LOG_STREAM_LEVEL": "WARNING",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "SWE_AGENT_TRAJECTORY_DIR": ".",  # any folder: its output goes where its command line says
}

# `info.exit_status` of the trajectory. With a change left behind it is `submitted (STATUS)`, which has the same meaning
# but another submitter. The exit code is 0 for all of them.
_STATUSES: Mapping[str, EndReason] = {
    "submitted": EndReason.SUBMITTED,
    "exit_forfeit": EndReason.SUBMITTED,  # it gave up
    "exit_command": EndReason.SUBMITTED,  # it typed `exit`
    "exit_cost": EndReason.STEP_LIMIT,  # limit of calls: the limit of cost is off
    "exit_context": EndReason.CONTEXT_EXHAUSTED,
    "exit_total_execution_time": EndReason.AGENT_TIMEOUT,
    "exit_format": EndReason.AGENT_ERROR,  # no usable reply, three times
    "exit_command_timeout": EndReason.AGENT_ERROR,  # three commands in turn took too long
    "exit_environment_error": EndReason.AGENT_ERROR,  # its own shell; the environment itself watches ours
    "exit_api": EndReason.MODEL_ERROR,
    "exit_error": EndReason.AGENT_ERROR,
    "exit_error: model": EndReason.MODEL_ERROR,  # the same, with an exception of its model client as the message
}
ENDINGS: Mapping[str, EndReason] = {
    **_STATUSES,
    **{f"submitted ({word})": reason for word, reason in _STATUSES.items() if word != "submitted"},
    "no trajectory": EndReason.AGENT_ERROR,  # it ended before its first step
}
# Variables that its library for GitHub (ghapi) sets in its own process: not part of the task.
_SET_BY_LIBRARIES = frozenset({"CONTEXT_GITHUB", "CONTEXT_NEEDS", "GITHUB_REPOSITORY"})
_BOXES = re.compile(r"[\u2500-\u257f]+")
_MODEL_CLIENT = re.compile(r"\blitellm\.\w*(Error|Exception|Timeout)\b")
_PROMPTS = ("system_template", "instance_template", "next_step_template", "next_step_no_output_template")
# No programs that wait for a key press, no progress bars.
_CALM = {"PAGER": "cat", "MANPAGER": "cat", "GIT_PAGER": "cat", "LESS": "-R", "TQDM_DISABLE": "1"}


class SweAgent(PinnedAdapter):
    """Adapter of SWE-agent. `source`: a URL for git with `@REF`, a tag or a whole commit.

    `lock`: another lock file, for a checkout that needs other packages.
    """

    name = "swe-agent"
    programs = ("bash", "git", "which")
    placement = Placement.INSIDE
    dialect = Dialect.CHAT
    endings = ENDINGS

    def __init__(
        self,
        installer: Installer,
        source: str | None,
        *,
        lock: Path = _LOCK,
        call_timeout_s: float = 480.0,
        call_attempts: int = 3,
    ) -> None:
        super().__init__(installer, call_timeout_s=call_timeout_s, call_attempts=call_attempts)
        self._source = source
        self.version = version_of(source or "")
        self._lock = lock

    def install(self) -> FrameworkBundle:
        """Raises: AgentUnavailable; AgentNotSetUp: the settings name no checkout, or no version."""
        if not self._source:
            raise AgentNotSetUp(
                "agent swe-agent: expected a checkout, because it is on no package index; found no setting "
                "swe_agent_source; set MEGAFLOW_SWE_AGENT_SOURCE to the URL that git clones SWE-agent from, with @REF: "
                "a tag or a whole commit (file:///FOLDER@REF for a clone on this host)"
            )
        return self._installer.checkout(self.name, self._source, self._lock, first_use=_FIRST_USE, first_use_env=_QUIET)

    def suits(self, shell: Shell) -> None:
        """Raises: AgentUnsuitable: another C library or architecture, a required program is missing, or no root."""
        super().suits(shell)
        if not shell.run(f"test -w {_ROOT}", timeout_s=_LOOK_S).ok:
            raise AgentUnsuitable(
                f"agent {self.name}: expected to be allowed to write to {_ROOT}, where SWE-agent keeps its tools; "
                "found that it is not; run the task as root, or give it to another agent"
            )

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        """Returns its command line; the task's text and the prompts are in files, because they may be long."""
        checkout, home, model = f"{place.tool}/source", place.home, place.model
        call = {"timeout_s": math.ceil(self._call_timeout_s), "attempts": self._call_attempts}
        env = {
            **_QUIET,
            "HOME": home,
            "OPENAI_API_KEY": model.key_text,
        }
        options = {
            "config": f"{home}/settings.yaml",
            "agent.model.name": f"openai/{model.name}",
            "agent.model.api_base": model.base_url,
            "agent.model.per_instance_cost_limit": "0",
            "agent.model.total_cost_limit": "0",
            "agent.model.per_instance_call_limit": str(job.limits.max_steps),
            "env.deployment.type": "local",
            "env.repo.type": "preexisting",
            "env.repo.reset": "false",  # the repository is already in the task's state, and there is no remote
            "problem_statement.type": "text_file",
            "problem_statement.path": f"{home}/task.md",
            "problem_statement.id": _ID,
            "output_dir": f"{home}/output",
        }
        return FrameworkCommand(
            argv=(
                *("/bin/sh", "-c", _START, "sh", f"{place.tool}/bin/python3"),
                *("-B", "-c", _MAIN, "run"),
                *(f"--{name}={value}" for name, value in options.items()),
            ),
            env=env,
            files={
                "settings.yaml": settings(self.install().folder / "source", checkout, place.workdir, job.limits, call),
                "task.md": job.description.encode(),
                BASHRC: bashrc(env.keys() - {"HOME"} | _SET_BY_LIBRARIES, last=_PROMPT),
            },
            results=(_TRAJECTORY,),
        )

    def ending(self, ended: Ended) -> AgentEnding:
        """Reads the status in its trajectory; without one, uses the end of the output."""
        trajectory = read_object(ended.home / _TRAJECTORY)
        info = trajectory.get("info") if isinstance(trajectory.get("info"), dict) else {}
        assert isinstance(info, dict)
        status = info.get("exit_status")
        if not isinstance(status, str):
            # It prints what is wrong with its settings on standard output, and on standard error that it did.
            printed = short(_BOXES.sub(" ", tail(ended.stdout)))
            output = "; ".join(filter(None, (tail(ended.stderr)[-200:], printed)))
            problem = f"expected a trajectory with an exit status; found exit code {ended.returncode}: {output}"
            return AgentEnding(ENDINGS["no trajectory"], problem, _steps(info))
        message = _last_words(trajectory)
        word = _word(status, message)
        reason = ENDINGS.get(word, ENDINGS.get(status, EndReason.AGENT_ERROR))
        detail = "" if status == "submitted" else short(f"{status}: {message}".rstrip(": "))
        return AgentEnding(reason, detail, _steps(info))


def settings(checkout: Path, seen_at: str, workdir: str, limits: Limits, call: dict[str, Any]) -> bytes:
    """Returns its settings as YAML. `checkout` is on this host, `seen_at` is the same folder where SWE-agent runs.

    The prompts are the checkout's own. The tools are only bash and `submit`: the default ones download a parser for
    every task. `call`: seconds (`timeout_s`) and attempts (`attempts`) of one model call.
    """
    return yaml.safe_dump(
        {
            "agent": {
                "templates": {
                    name: text.replace("{{working_dir}}", workdir) for name, text in _templates(checkout).items()
                },
                "tools": {
                    "bundles": [{"path": f"{seen_at}/tools/registry"}, {"path": f"{seen_at}/tools/submit"}],
                    "enable_bash_tool": True,
                    "parse_function": {"type": "function_calling"},
                    "env_variables": _CALM,
                    "execution_timeout": max(1, int(limits.command_timeout_s)),
                    # Its own limit for all commands together is no lower than our time limit.
                    "total_execution_timeout": max(1, int(limits.agent_timeout_s)),
                },
                "model": {
                    # The client's own retries are off: the framework's are counted and logged.
                    "completion_kwargs": {"timeout": call["timeout_s"], "max_retries": 0},
                    "retry": {"retries": call["attempts"], "min_wait": 1, "max_wait": 4},
                    "max_input_tokens": 0,  # the inference server decides whether it is too long
                },
            }
        },
        sort_keys=False,
    ).encode()


def _templates(checkout: Path) -> dict[str, str]:
    """Returns the texts of the checkout's default configuration. Raises: AgentNotSetUp: it does not state the task."""
    file = checkout / "config" / "default.yaml"
    try:
        templates = yaml.safe_load(file.read_bytes())["agent"]["templates"]
        texts = {name: templates[name] for name in _PROMPTS if isinstance(templates.get(name), str)}
        if "instance_template" in texts:
            return texts
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        pass
    raise AgentNotSetUp(f"agent swe-agent: expected {file} with agent.templates.instance_template; found none")


def _word(status: str, message: str) -> str:
    if "exit_error" in status and _MODEL_CLIENT.search(message):
        return status.replace("exit_error", "exit_error: model")
    return status


def _last_words(told: dict[str, Any]) -> str:
    steps = told.get("trajectory")
    last = steps[-1] if isinstance(steps, list) and steps and isinstance(steps[-1], dict) else {}
    return str(last.get("response") or last.get("thought") or "")


def _steps(info: dict[str, Any]) -> int | None:
    stats = info.get("model_stats")
    calls = stats.get("api_calls") if isinstance(stats, dict) else None
    return calls if isinstance(calls, int) else None
