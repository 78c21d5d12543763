"""Scripted conversations: what a turn may be, and reading scripts from files. No I/O but that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.errors import SpecInvalid


class ReplayError(Exception):
    """A request that nothing answers; becomes a refusal in the caller's dialect with `status` and `code`."""

    def __init__(self, code: str, message: str, *, status: int = 404) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Turn(BaseModel):
    """What the model says at one point of the conversation, and what goes wrong there.

    An answer is a `thought`, a `command` or a `submit`; a thought alone is a reply in plain words. A fault stands
    alone and lasts, or happens on the first `times` tries of the turn, and then its answer follows.
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
    retry_after_s: float | None = Field(default=None, ge=0.0)
    """Its `retry-after` header; only with `status`."""
    context_exceeded: bool = False
    """The refusal of a prompt that is too long, in the caller's dialect."""
    garbage: bool = False
    """HTTP 200 with a body that is no answer."""
    cut: bool = False
    """The connection ends in the middle of the answer."""
    times: int | None = Field(default=None, ge=1)
    """The fault (or `delay_s`) happens on so many tries of this turn only; None: on every one."""

    delay_s: float = Field(default=0.0, ge=0.0)
    """Seconds of silence before the answer or the fault. A caller that hangs up ends it."""
    token_delay_s: float = Field(default=0.0, ge=0.0)
    """Seconds before each word of a streamed answer; a whole answer comes after all of them."""

    @property
    def answers(self) -> bool:
        return self.command is not None or self.submit or bool(self.thought.strip())

    @property
    def refuses(self) -> bool:
        """The fault stands instead of an answer."""
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
        return self

    @model_validator(mode="after")
    def _fault_and_answer(self) -> Turn:
        if self.times is not None:
            if not (self.refuses or self.cut or self.delay_s):
                raise ValueError("times counts faults; give one with it, or delay_s")
            if not self.answers:
                raise ValueError("expected the answer that follows the fault: a thought, a command or submit")
        elif self.refuses and (self.command is not None or self.submit or self.cut):
            raise ValueError("a fault without times lasts, its answer would never come; give times or split the turn")
        return self


class Script(BaseModel):
    """One scripted conversation."""

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
    """`text` with every run of white space made one blank, so that line breaks do not hinder a match."""
    return " ".join(text.split())


def load_scripts(folders: Iterable[Path]) -> tuple[Script, ...]:
    """Every `*.yaml` and `*.yml` directly in `folders`, checked.

    Raises: SpecInvalid: no such folder, no script in any of them, a malformed file, two of one name, or two that match
        one text.
    """
    looked_in = list(folders)
    scripts = [(path, _read(path)) for folder in looked_in for path in _files(folder)]
    if not scripts:
        raise SpecInvalid(
            f"replay scripts: expected at least one *.yaml file; found none in {listed(map(str, looked_in))}; "
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


def listed(names: Iterable[str]) -> str:
    """Names for an error message."""
    return ", ".join(sorted(names)) or "none"
