"""Reads and checks `result.json`, in which an external adapter says how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.agents.framework import AgentEnding, Ended
from app.errors import explained
from app.models.endings import EndReason

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
"""The rest is for us to tell: an adapter cannot know that its worker was lost, or that the attempt was cancelled."""

ENDINGS: Mapping[str, EndReason] = {
    **{reason.value: reason for reason in MAY_SAY},
    NO_RESULT: EndReason.AGENT_ERROR,
    BAD_RESULT: EndReason.AGENT_ERROR,
    KILLED: EndReason.INFRASTRUCTURE,  # not by us: out of memory, a shutdown
}

_LONGEST_BYTES = 1 << 20
_DETAIL_CHARS = 2000
_Count = Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False)]


class Result(BaseModel):
    """What the file may say."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    protocol: Literal["megaflow-agent/1"]
    end_reason: str
    detail: str = ""
    steps: int | None = Field(default=None, ge=0, lt=1 << 31)
    usage: dict[str, _Count] = Field(default={}, max_length=64)

    @field_validator("end_reason")
    @classmethod
    def _may_be_said(cls, value: str) -> str:
        if value not in {reason.value for reason in MAY_SAY}:
            raise ValueError(f"expected one of {', '.join(MAY_SAY)}; found {value!r:.80}")
        return value


def ending(ended: Ended) -> AgentEnding:
    """The result as it stands in the adapter's home; whatever is wrong with it is the adapter's error."""
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
        said = Result.model_validate_json(content)
    except ValueError as error:
        why = f"{RESULT}: {_faults(error)}; it ended with exit code {ended.returncode}"
        return AgentEnding(ENDINGS[BAD_RESULT], why)
    return AgentEnding(EndReason(said.end_reason), said.detail[:_DETAIL_CHARS], said.steps, said.usage)


def _faults(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    each = (f"{'.'.join(map(str, one['loc']))}: {explained(one)}; found {one['input']!r:.80}" for one in error.errors())
    return "; ".join(each)[:_DETAIL_CHARS]
