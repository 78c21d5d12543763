"""Reads scripts of conversations, and finds the next step.

No state is kept between two requests: script and turn follow from the conversation alone, so a repeated request
gets the same answer and any number of conversations may use one script at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.errors import SpecInvalid
from app.model_service.dialects.base import Message
from app.model_service.serving import CallRefusal


class Turn(BaseModel):
    """Answer of the model at one point of the conversation, and the faults there.

    An answer is a `thought`, a `command` or a `submit`; a thought alone is a reply in plain words. A refusal
    (`status`, `context_exceeded`, `garbage`) has its own turn. Faults repeat: no answer moves the conversation on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    thought: str = ""
    command: str | None = Field(default=None, min_length=1)
    """A shell command."""
    submit: bool = False
    """Ends the task in the way that the calling framework requires."""

    status: int | None = Field(default=None, ge=400, le=599)
    """An HTTP error instead of an answer."""
    message: str | None = None
    """The text of that error; only with `status`."""
    retry_after_s: float | None = Field(default=None, ge=0.0)
    """The `retry-after` header of that error; only with `status`."""
    context_exceeded: bool = False
    """The refusal of a prompt that is too long, in the caller's dialect."""
    garbage: bool = False
    """HTTP 200 with a body that is no answer."""
    cut: bool = False
    """The connection ends in the middle of the answer."""

    delay_s: float = Field(default=0.0, ge=0.0)
    """Seconds of silence before the answer or the fault. A caller that hangs up ends it."""

    @property
    def answers(self) -> bool:
        return self.command is not None or self.submit or bool(self.thought.strip())

    @property
    def refuses(self) -> bool:
        """Whether the turn is a fault instead of an answer."""
        return self.status is not None or self.context_exceeded or self.garbage

    @model_validator(mode="after")
    def _one_meaning(self) -> Turn:
        if self.command is not None and self.submit:
            raise ValueError("expected command or submit, found both; split it into two turns")
        if sum((self.status is not None, self.context_exceeded, self.garbage)) > 1:
            raise ValueError("expected at most one of status, context_exceeded, garbage; split it into several turns")
        if not self.answers and not self.refuses:
            raise ValueError("expected a thought, a command, submit or a fault; the turn says nothing")
        if self.status is None and (self.message is not None or self.retry_after_s is not None):
            raise ValueError("message and retry_after_s belong to an HTTP error; give its status with them")
        if self.refuses and (self.command is not None or self.submit or self.cut):
            raise ValueError("a fault stands alone, its answer would never come; split the turn")
        return self


class Script(BaseModel):
    """A scripted conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str | None
    """A sentence that occurs in this task's statement and in no other; white space does not count. None: the script
    is found by its name alone."""
    turns: tuple[Turn, ...] = Field(min_length=1)
    name: str = ""
    """Defaults to the file's name without its ending."""

    @field_validator("match")
    @classmethod
    def _normalised(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not (flat := flatten(value)):
            raise ValueError("expected a sentence of the task's statement, or null; it is empty")
        return flat


def flatten(text: str) -> str:
    """Replaces each run of white space in `text` by one blank, so that line breaks do not prevent a match."""
    return " ".join(text.split())


def load_scripts(folders: Iterable[Path]) -> tuple[Script, ...]:
    """Reads and checks every `*.yaml` and `*.yml` directly in `folders`.

    Raises: SpecInvalid: no such folder, no script in any of them, a malformed file, two of one name, or two that match
        one text.
    """
    paths = list(folders)
    scripts = [(path, _read(path)) for folder in paths for path in _files(folder)]
    if not scripts:
        raise SpecInvalid(
            f"replay scripts: expected at least one *.yaml file; found none in {name_list(map(str, paths))}; "
            "write one (app/model_service/replay/README.md shows the format) or name another folder"
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
    except (OSError, ValueError, RecursionError, OverflowError, yaml.YAMLError) as error:
        raise SpecInvalid(f"{path}: expected a readable YAML file; found: {flatten(str(error))}") from error
    if not isinstance(raw, dict):
        raise SpecInvalid(f"{path}: expected the keys match and turns; found {type(raw).__name__}")
    try:
        return Script.model_validate({"name": path.stem, **raw})
    except ValidationError as error:
        raise SpecInvalid(
            f"{path}: {_fields(error)}; README.md of app/model_service/replay shows the format"
        ) from error


def _fields(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors())


def _refuse_ambiguity(scripts: Sequence[tuple[Path, Script]]) -> None:
    for at, (path, script) in enumerate(scripts):
        for other_path, other in scripts[at + 1 :]:
            if script.name == other.name:
                raise SpecInvalid(f"{other_path}: expected a name of its own; found {other.name!r}, as {path} has it")
            if script.match and other.match and (script.match in other.match or other.match in script.match):
                raise SpecInvalid(
                    f"{other_path}: match: expected a sentence of one task only; found {other.match!r}, which "
                    f"overlaps with {script.match!r} of {path}; choose a longer one"
                )


def name_list(names: Iterable[str]) -> str:
    """Returns names as a text for an error message."""
    return ", ".join(sorted(names)) or "none"


_CALL_ID = re.compile(r"call_(\d+)_\d+")
_SUBMIT_AGAIN = 2


def call_id(turn: int, number: int) -> str:
    """Returns the id of a turn's tool call. Frameworks send it back, so it shows which turns are over, however they
    merge, split or drop messages."""
    return f"call_{turn}_{number}"


def choose(scripts: Sequence[Script], messages: Sequence[Message]) -> tuple[Script, int]:
    """Returns the script whose `match` occurs in the messages, and the number of the turn that is due, from 0.

    Only messages before the first command are searched: later ones contain the output of commands, which may quote
    another task's statement.

    Raises: CallRefusal: no script, several scripts, or none of its turns left.
    """
    searched = []
    for at, text in _openings(messages):
        matches = [script for script in scripts if script.match is not None and script.match in text]
        if len(matches) > 1:
            raise CallRefusal(
                404,
                "scenario_ambiguous",
                f"expected one script to match; found {name_list(script.name for script in matches)}; "
                "choose longer match sentences",
            )
        if matches:
            return matches[0], in_script(matches[0], turn_due(messages[at:]))
        searched.append(text)
    raise CallRefusal(
        404,
        "scenario_unknown",
        f"expected a conversation that contains the match sentence of a script; found none in "
        f"{_shown(' '.join(searched))}; add a script for this task or correct its match; known scripts: "
        f"{name_list(script.name for script in scripts)}",
    )


def in_script(script: Script, due: int) -> int:
    """Returns `due`, if the script has such a turn. A submission stays due for a while: SWE-agent, for example, shows a
    review and requires it again.

    Raises: CallRefusal.
    """
    last = len(script.turns) - 1
    if due <= last or (script.turns[last].submit and due <= last + _SUBMIT_AGAIN):
        return due
    raise CallRefusal(
        404,
        "scenario_over",
        f"expected at most {last + 1} turns in script {script.name!r}; found a request for turn {due + 1}; "
        "end the script with `submit: true` or add turns",
    )


def turn_due(messages: Sequence[Message]) -> int:
    """Counts the answers in a conversation. Neighbouring messages of the assistant are one answer."""
    due, answering = 0, False
    for message in messages:
        if message.get("role") != "assistant":
            answering = False
            continue
        turns = [
            int(turn[1]) for call in message.get("tool_calls") or () if (turn := _CALL_ID.fullmatch(str(call["id"])))
        ]
        if turns:
            due = max(due, max(turns) + 1)
        elif not answering:
            due += 1
        answering = True
    return due


def opening_text(messages: Sequence[Message]) -> str:
    """Returns the system's and user's text before the first answer."""
    opening = takewhile(lambda message: message.get("role") != "assistant", messages)
    return "\n".join(words(message.get("content")) for message in opening)


def _openings(messages: Sequence[Message]) -> Iterator[tuple[int, str]]:
    """Yields the start and the text of each run of prompt messages, up to the first answer that may be a command.

    A framework may insert a message of the assistant before the task (Qwen Code's line of the Gemini CLI lets it
    acknowledge its surroundings).
    """
    begin, parts = 0, list[str]()
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            parts.append(words(message.get("content")))
            continue
        if parts:
            yield begin, flatten("\n".join(parts))
        if message.get("tool_calls") or "```" in words(message.get("content")):
            return
        begin, parts = at + 1, []
    if parts:
        yield begin, flatten("\n".join(parts))


def words(content: object) -> str:
    """Returns the text of a message's content."""
    match content:
        case str():
            return content
        case list():
            return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        case _:
            return ""


def _shown(text: str) -> str:
    return repr(text if len(text) <= 400 else f"{text[:200]} … {text[-200:]}")
