"""Scripted conversations: the replay engine's nouns, how one is found, how a turn is put. No I/O but reading files.

A script belongs to one task and is found by a sentence of that task. Nothing is remembered between two requests:
which turn is due follows from the number of assistant messages in the request, so a repeated request gives the
same answer and any number of conversations may use one script at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.errors import SpecInvalid

SUBMISSION = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_SUBMISSION_OF_PATCH = f"{SUBMISSION} && cat patch.txt"
_WRITE_PATCH = "git diff > patch.txt"


class ReplayError(Exception):
    """A request that no script answers; becomes an OpenAI-style error body with `status` and `code`."""

    def __init__(self, code: str, message: str, *, status: int = 404) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Turn(BaseModel):
    """What the model says at one point of the conversation, or the fault that happens instead.

    At most one of `command`, `submit`, `status` and `garbage`; with none of them the turn is a reply in plain
    words, which most frameworks refuse. A fault repeats as long as its turn is due, because nothing is remembered:
    it stands for an endpoint that stays broken.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    thought: str = ""
    command: str | None = Field(default=None, min_length=1)
    """A shell command."""
    submit: bool = False
    """Ends the task in the way in which the calling framework wants it."""
    status: int | None = Field(default=None, ge=400, le=599)
    """An HTTP error instead of an answer."""
    message: str | None = None
    """The text of that error; only with `status`."""
    delay_s: float = Field(default=0.0, ge=0.0)
    """Seconds of silence before the answer or the fault."""
    garbage: bool = False
    """HTTP 200 with a body that is no completion."""

    @model_validator(mode="after")
    def _one_meaning(self) -> Turn:
        said = [self.command is not None, self.submit, self.status is not None, self.garbage]
        if sum(said) > 1:
            raise ValueError("expected at most one of command, submit, status, garbage; split it into several turns")
        if not any(said) and not self.thought.strip():
            raise ValueError("expected a thought, a command, submit, status or garbage; the turn is empty")
        if self.message is not None and self.status is None:
            raise ValueError("message is the text of an error; give the status with it")
        return self


class Script(BaseModel):
    """One scripted conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str
    """A sentence that occurs in this task's statement and in no other; white space does not count."""
    turns: tuple[Turn, ...] = Field(min_length=1)
    name: str = ""
    """Defaults to the file's name without its ending."""

    @field_validator("match")
    @classmethod
    def _normalised(cls, value: str) -> str:
        if not (flat := flatten(value)):
            raise ValueError("expected a sentence of the task's statement; it is empty")
        return flat


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn in the calling framework's terms: text, and calls of one of the tools that it offered."""

    text: str
    tool: str | None
    commands: tuple[str, ...]
    """Arguments of the tool calls, in order; empty when `tool` is None."""


def flatten(text: str) -> str:
    """`text` with every run of white space made one blank, so that line breaks do not hinder a match."""
    return " ".join(text.split())


# --- Reading -------------------------------------------------------------------------------------------------------


def load_scripts(folders: Iterable[Path]) -> tuple[Script, ...]:
    """Every `*.yaml` and `*.yml` directly in `folders`, checked.

    Raises: SpecInvalid: no such folder, no script in any of them, a malformed file, or two that match one text.
    """
    looked_in = list(folders)
    scripts = [(path, _read(path)) for folder in looked_in for path in _files(folder)]
    if not scripts:
        raise SpecInvalid(
            f"replay scripts: expected at least one *.yaml file; found none in {_listed(map(str, looked_in))}; "
            "write one (app/model_service/README.md shows the format) or name another folder"
        )
    _refuse_ambiguity(scripts)
    return tuple(script for _, script in scripts)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise SpecInvalid(f"replay scripts: expected a folder; found nothing at {folder}; check the path")
    return sorted(path for path in folder.iterdir() if path.suffix in {".yaml", ".yml"})


def _read(path: Path) -> Script:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecInvalid(f"{path}: expected a readable YAML file; found: {flatten(str(error))}") from error
    if not isinstance(raw, dict):
        raise SpecInvalid(f"{path}: expected the keys match and turns; found {type(raw).__name__}")
    try:
        return Script.model_validate({"name": path.stem, **raw})
    except ValidationError as error:
        raise SpecInvalid(f"{path}: {_fields(error)}; README.md of app/model_service shows the format") from error


def _fields(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors())


def _refuse_ambiguity(scripts: Sequence[tuple[Path, Script]]) -> None:
    for at, (path, script) in enumerate(scripts):
        for other_path, other in scripts[at + 1 :]:
            if script.match in other.match or other.match in script.match:
                raise SpecInvalid(
                    f"{other_path}: match: expected a sentence of one task only; found {other.match!r}, which "
                    f"overlaps with {script.match!r} of {path}; choose a longer one"
                )


# --- Finding the turn ------------------------------------------------------------------------------------------------


def choose(scripts: Sequence[Script], messages: Sequence[Mapping[str, Any]]) -> tuple[Script, int]:
    """The script that the conversation belongs to, and the index of the turn that is due.

    Only what was said before the first answer is searched: later messages carry the output of commands, which may
    quote another task's statement.

    Raises: ReplayError: no script, several scripts, or none of its turns left.
    """
    said = flatten(task_text(messages))
    found = [script for script in scripts if script.match in said]
    names = _listed(script.name for script in scripts)
    if not found:
        raise ReplayError(
            "scenario_unknown",
            f"expected a conversation that contains the match sentence of a script; found none in {said[:200]!r}; "
            f"add a script for this task or correct its match; known scripts: {names}",
        )
    if len(found) > 1:
        raise ReplayError(
            "scenario_ambiguous",
            f"expected one script to match; found {_listed(script.name for script in found)}; "
            "choose longer match sentences",
        )
    turn = sum(message.get("role") == "assistant" for message in messages)
    if turn >= len(found[0].turns):
        raise ReplayError(
            "scenario_over",
            f"expected at most {len(found[0].turns)} turns in script {found[0].name!r}; found a request for turn "
            f"{turn + 1}; end the script with `submit: true` or add turns",
        )
    return found[0], turn


def task_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The system's and user's words before the first answer."""
    told: list[str] = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        told.append(_words(message.get("content")))
    return "\n".join(told)


def _words(content: object) -> str:
    match content:
        case str():
            return content
        case list():
            return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        case _:
            return ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# --- Rendering -------------------------------------------------------------------------------------------------------


def render(turn: Turn, *, task: str, tools: Sequence[Mapping[str, Any]]) -> Reply:
    """`turn` as the calling framework wants it: a call of its command tool, or a fenced block where it has none.

    `task` is what the framework told the model (`task_text`): it says how to submit.
    """
    commands = _commands(turn, task, one_only=not tools)
    if not commands:
        return Reply(turn.thought, None, ())
    if not tools:
        return Reply(f"{turn.thought}\n\n```{_fence(task)}\n{commands[0]}\n```".lstrip(), None, ())
    return Reply(turn.thought, _command_tool(tools), tuple(commands))


def _commands(turn: Turn, task: str, *, one_only: bool) -> list[str]:
    if turn.command is not None:
        return [turn.command]
    if not turn.submit:
        return []
    if _SUBMISSION_OF_PATCH not in task:
        return [SUBMISSION]
    # mini-swe-agent's benchmark prompts want the patch itself printed, its text-only ones a single command a turn.
    steps = [_WRITE_PATCH, _SUBMISSION_OF_PATCH]
    return [" && ".join(steps)] if one_only else steps


def _fence(task: str) -> str:
    """The name of the fenced block: mini-swe-agent's text configurations look for one of these, and say which."""
    return "mswea_bash_command" if "```mswea_bash_command" in task else "bash"


def _command_tool(tools: Sequence[Mapping[str, Any]]) -> str:
    names: list[str] = []
    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, dict) else {}
        names.append(str(function.get("name", "?")))
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and "command" in (parameters.get("properties") or {}):
            return names[-1]
    raise ReplayError(
        "no_command_tool",
        f"expected a tool with a parameter `command`; found the tools {_listed(names)}; "
        "offer one, or none to get fenced blocks",
        status=400,
    )


def count_tokens(value: object) -> int:
    """About how many tokens `value` is: a quarter of its characters, rounded up, at least 1.

    An estimate: no tokenizer belongs to a script. Good for a plausible `usage`, not for billing.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return max(1, -(-len(text) // 4))
