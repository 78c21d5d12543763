"""Runs Claude Code, unmodified, inside the environment."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path

from app.agents.adapter import PinnedAdapter
from app.agents.base import AgentJob
from app.agents.framework import AgentEnding, Ended, FrameworkBundle, FrameworkCommand, FrameworkPaths, Placement
from app.agents.stream_json import result, short, tail
from app.models.endings import EndReason
from app.models.model_calls import Dialect

_PACKAGE = Path(__file__).parent
_MACHINE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_PROGRAM = f"node_modules/@anthropic-ai/claude-code-linux-{_MACHINE}/claude"
_SETTINGS = "settings.json"
_COMMANDS = "before-commands.sh"

# No telemetry, no error reports, no update checks, no download of plugin or model lists.
_QUIET: Mapping[str, str] = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}

# By the result line's `terminal_reason`, or its `subtype` if there is none. Neither the exit code nor the subtype is
# reliable: a failed model gives `subtype: success` with `is_error: true` and the exit code of a limit.
ENDINGS: Mapping[str, EndReason] = {
    "completed": EndReason.SUBMITTED,  # a reply without a tool, with or without text
    "max_turns": EndReason.STEP_LIMIT,
    "budget_exhausted": EndReason.BUDGET_EXHAUSTED,  # its own limit, which is off
    "prompt_too_long": EndReason.CONTEXT_EXHAUSTED,
    "api_error": EndReason.MODEL_ERROR,  # refused, failed, cut, garbage, no answer or unreachable
    "aborted_streaming": EndReason.AGENT_ERROR,  # interrupted while its model answered
    "aborted_tools": EndReason.AGENT_ERROR,  # interrupted while a command ran
    "no result, signal": EndReason.AGENT_ERROR,  # a crash, or by its own command: inside they cannot be told apart
    "no result": EndReason.AGENT_ERROR,
}


class ClaudeCode(PinnedAdapter):
    """Adapter of Claude Code."""

    name = "claude-code"
    version = "2.1.329"
    placement = Placement.INSIDE
    dialect = Dialect.MESSAGES
    endings = ENDINGS

    def install(self) -> FrameworkBundle:
        """Raises: AgentUnavailable."""
        return self._installer.npm(self.name, _PACKAGE, with_node=False, first_use=(_PROGRAM, "--version"))

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        """Returns its command line; the task's text goes to its stdin, because it may be too long for an argument."""
        env = self._environ(job, place)
        settings = {
            # Set again here: a repository's own settings would override the process's variables.
            "env": {name: value for name, value in env.items() if name != "ANTHROPIC_API_KEY"},
            "skipWebFetchPreflight": True,  # would send every host name to the vendor
        }
        return FrameworkCommand(
            argv=(
                f"{place.tool}/{_PROGRAM}",
                "--print",
                *("--output-format", "stream-json", "--verbose"),  # one requires the other
                "--dangerously-skip-permissions",
                *("--max-turns", str(job.limits.max_steps)),
                *(["--append-system-prompt", prompt] if (prompt := job.arguments.get("append_system_prompt")) else []),
                *("--settings", f"{place.home}/{_SETTINGS}"),
            ),
            env=env,
            files={
                _SETTINGS: json.dumps(settings, indent=1).encode(),
                _COMMANDS: f"unset {shlex.join(sorted(env))}\n".encode(),
            },
            stdin=job.description.encode(),
        )

    def _environ(self, job: AgentJob, place: FrameworkPaths) -> dict[str, str]:
        limits, model = job.limits, place.model
        call_ms, command_ms = _milliseconds(self._call_timeout_s), _milliseconds(limits.command_timeout_s)
        env = {
            **_QUIET,
            "IS_SANDBOX": "1",  # otherwise it refuses to run as root without permission prompts
            "CLAUDE_CONFIG_DIR": f"{place.home}/claude",
            "CLAUDE_CODE_TMPDIR": f"{place.home}/tmp",
            "CLAUDE_ENV_FILE": f"{place.home}/{_COMMANDS}",  # read before each of its commands
            "ANTHROPIC_BASE_URL": model.anthropic_url,
            "ANTHROPIC_API_KEY": model.key_text,
            **dict.fromkeys(_MODELS, model.name),
            "API_TIMEOUT_MS": call_ms,
            "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": call_ms,
            "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": call_ms,
            "CLAUDE_ENABLE_BYTE_WATCHDOG": "1",  # without it there is no timeout for a stalled stream
            "API_FORCE_IDLE_TIMEOUT": "0",  # another watchdog, of five minutes
            "CLAUDE_CODE_MAX_RETRIES": str(max(0, self._call_attempts - 1)),
            # Retries a broken stream as a stream: no second answer without streaming.
            "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
            "BASH_DEFAULT_TIMEOUT_MS": command_ms,
            "BASH_MAX_TIMEOUT_MS": command_ms,
            # Otherwise a command past its timeout runs on, and the end waits for it, up to ten minutes.
            "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
        }
        if (thinking := job.arguments.get("max_thinking_tokens")) is not None:
            env["MAX_THINKING_TOKENS"] = thinking
        if limits.max_turn_tokens is not None:
            env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(limits.max_turn_tokens)
        if limits.context_tokens is not None:
            env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(limits.context_tokens)
        return env

    def ending(self, ended: Ended) -> AgentEnding:
        """Reads the last result line of its output; without one, uses the signal or the end of the output."""
        row = result(ended.stdout)
        if not row:
            word = "no result, signal" if ended.returncode < 0 else "no result"
            output = tail(ended.stderr) or tail(ended.stdout)
            return AgentEnding(
                ENDINGS[word], f"expected a result line; found exit code {ended.returncode}: {output}".strip()
            )
        word = str(row.get("terminal_reason") or row.get("subtype"))
        reason = ENDINGS.get(word, EndReason.AGENT_ERROR)
        if reason is EndReason.SUBMITTED and row.get("is_error"):
            reason = EndReason.AGENT_ERROR
        output = row.get("result") or "; ".join(map(str, row.get("errors") or ()))
        detail = "" if reason is EndReason.SUBMITTED else short(f"{word}: {output}".rstrip(": "))
        turns = row.get("num_turns")
        return AgentEnding(reason, detail, turns if isinstance(turns, int) else None)


# Every model it may use, for the task or for side calls, is the task's model.
_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))
