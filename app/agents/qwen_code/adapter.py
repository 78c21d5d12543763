"""Runs Qwen Code, unmodified, inside the environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.agents.adapter import PinnedAdapter
from app.agents.base import AgentJob
from app.agents.framework import AgentEnding, Ended, FrameworkBundle, FrameworkCommand, FrameworkPaths, Placement
from app.agents.stream_json import result, short, tail
from app.models.endings import EndReason
from app.models.model_calls import Dialect

_PACKAGE = Path(__file__).parent
_ROOT = "node_modules/@qwen-code/qwen-code"
_PROGRAM = f"{_ROOT}/cli.js"
_SETTINGS = "settings.json"
_COMMANDS = "before-commands.sh"
_START = """\
[ -d "${HOME-}" ] || HOME=${0%/*}
TASKS_BASH_ENV=${BASH_ENV-} BASH_ENV=$0
export HOME TASKS_BASH_ENV BASH_ENV
exec "$@"
"""
"""Start script: bash reads that file, `$0`, before each command of the framework; the image's BASH_ENV is saved. Qwen
Code does not start without an existing home folder, so it then gets its own."""
_LONGEST_COMMAND_MS = 600_000  # upper limit of its settings
_LONGEST_ARGUMENT_BYTES = 100_000  # the kernel allows 128 KiB

# The package's search program is not executable: this makes it so, then tests that it starts.
_FIRST_USE = (
    "-e",
    "const fs = require('fs'), [vendor, program] = process.argv.slice(1);"
    "for (const folder of fs.readdirSync(vendor)) if (fs.existsSync(`${vendor}/${folder}/rg`))"
    " fs.chmodSync(`${vendor}/${folder}/rg`, 0o755);"
    "require('child_process').execFileSync(process.execPath, [program, '--version'], { stdio: 'inherit' });",
    f"{_ROOT}/vendor/ripgrep",
    _PROGRAM,
)

# If it ended by itself: the result line's `subtype`, and for an error the start of its message. It writes no such line
# when its own limit is reached: there is only the exit code.
ENDINGS: Mapping[str, EndReason] = {
    "success": EndReason.SUBMITTED,  # a reply without a tool
    "error_during_execution: API Error": EndReason.MODEL_ERROR,  # refused, failed, cut, garbage, unreachable
    "error_during_execution: API Error, context": EndReason.CONTEXT_EXHAUSTED,
    "error_during_execution": EndReason.AGENT_ERROR,  # anything else, such as repeating the same call
    "exit code 53": EndReason.STEP_LIMIT,  # of turns
    "exit code 55": EndReason.BUDGET_EXHAUSTED,  # of tool calls or of time, which are off
    "exit code 42": EndReason.AGENT_ERROR,  # its input
    "exit code 52": EndReason.AGENT_ERROR,  # its configuration
    "no result, signal": EndReason.AGENT_ERROR,  # a crash, or by its own command: inside they cannot be told apart
    "no result": EndReason.AGENT_ERROR,
}
_API_ERROR = "[API Error"
_TOO_LONG = ("context length", "context_length", "context window", "prompt is too long")


class QwenCode(PinnedAdapter):
    """Adapter of Qwen Code. `call_timeout_s` limits one attempt at a model call, with the waiting time at the gateway.

    Its number of attempts is fixed: seven, 1.5 to 30 s apart, for a busy or broken inference server, which takes about
    80 s. A server that sends `Retry-After` with 429 or 503 sets the pauses. `call_attempts` is not used: it would
    multiply those seven attempts.
    """

    name = "qwen-code"
    version = "0.24.4"
    placement = Placement.INSIDE
    dialect = Dialect.CHAT
    endings = ENDINGS

    def install(self) -> FrameworkBundle:
        """Raises: AgentUnavailable."""
        return self._installer.npm(self.name, _PACKAGE, first_use=_FIRST_USE)

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        """Returns its command line; a task's text that is too long for an argument goes to its stdin.

        Short texts do not: it waits half a second for stdin and then starts without, and a loaded host may be slower.
        """
        env, task = self._environ(place), job.description.encode()
        short_enough = len(task) <= _LONGEST_ARGUMENT_BYTES
        return FrameworkCommand(
            argv=(
                *("/bin/sh", "-c", _START, f"{place.home}/{_COMMANDS}"),
                f"{place.tool}/bin/node",
                # Options of its own launcher, which would start two more processes; and no optimising of the parser of
                # shell commands, which would take longer than all parsing of a task.
                *("--expose-gc", "--liftoff-only"),
                f"{place.tool}/{_PROGRAM}",
                *("--auth-type", "openai", "--model", place.model.name),
                *("--output-format", "stream-json"),
                "--yolo",
                *("--max-session-turns", str(job.limits.max_steps)),
                *([f"--prompt={job.description}"] if short_enough else []),
            ),
            env=env,
            files={
                _SETTINGS: json.dumps(self._settings(job), indent=1).encode(),
                _COMMANDS: _before_commands(env),
            },
            stdin=b"" if short_enough else task,
        )

    def _environ(self, place: FrameworkPaths) -> dict[str, str]:
        return {
            "QWEN_HOME": f"{place.home}/qwen",
            "QWEN_RUNTIME_DIR": f"{place.home}/qwen",
            # Overrides the repository's own settings.
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{place.home}/{_SETTINGS}",
            "QWEN_CODE_NO_RELAUNCH": "true",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "OPENAI_BASE_URL": place.model.base_url,
            "OPENAI_API_KEY": place.model.key_text,
        }

    def _settings(self, job: AgentJob) -> dict[str, Any]:
        limits = job.limits
        call_ms = max(1, round(self._call_timeout_s * 1000))
        calls: dict[str, Any] = {
            "timeout": call_ms,
            "streamIdleTimeoutMs": call_ms,
            "maxRetries": 0,  # of its client and of one more loop around the seven
        }
        if limits.max_turn_tokens is not None:
            calls["samplingParams"] = {"max_tokens": limits.max_turn_tokens}
        if limits.context_tokens is not None:
            calls["contextWindowSize"] = limits.context_tokens
        command_ms = min(_LONGEST_COMMAND_MS, max(1, round(limits.command_timeout_s * 1000)))
        return {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "preventSystemSleep": False},
            # After a task it would call the model to choose what to remember.
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "model": {"generationConfig": calls},
            "tools": {"shell": {"defaultTimeoutMs": command_ms, "heartbeatIntervalMs": 0}},
        }

    def ending(self, ended: Ended) -> AgentEnding:
        """Reads its result line; without one, uses its exit code, the signal, or the end of its output."""
        row = result(ended.stdout)
        if not row:
            return _unsaid(ended)
        turns = row.get("num_turns")
        steps = turns if isinstance(turns, int) else None
        if row.get("subtype") == "success" and not row.get("is_error"):
            return AgentEnding(ENDINGS["success"], "", steps)
        error = row.get("error")
        message = str(error.get("message", "")) if isinstance(error, dict) else str(error or row.get("result") or "")
        return AgentEnding(ENDINGS[_word(message)], short(f"{row.get('subtype')}: {message}".rstrip(": ")), steps)


def _before_commands(env: Mapping[str, str]) -> bytes:
    """Returns a script that removes our variables and runs the image's own start-up file."""
    return f"""\
BASH_ENV=$TASKS_BASH_ENV
unset TASKS_BASH_ENV {shlex.join(sorted(env))}
if [ -n "$BASH_ENV" ]; then . "$BASH_ENV"; else unset BASH_ENV; fi
""".encode()


def _word(message: str) -> str:
    if not message.startswith(_API_ERROR):
        return "error_during_execution"
    if any(sign in message.lower() for sign in _TOO_LONG):
        return "error_during_execution: API Error, context"
    return "error_during_execution: API Error"


def _unsaid(ended: Ended) -> AgentEnding:
    word = f"exit code {ended.returncode}"
    if word not in ENDINGS:
        word = "no result, signal" if ended.returncode < 0 else "no result"
    output = tail(ended.stderr) or tail(ended.stdout)
    return AgentEnding(ENDINGS[word], f"exit code {ended.returncode} and no result line: {output}".rstrip(": "))
