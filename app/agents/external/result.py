"""Reads and checks `result.json`, in which an external adapter says how it ended."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.agents.external.manifest import PROTOCOL
from app.agents.framework import AgentEnding, Ended
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

_KEYS = frozenset({"protocol", "end_reason", "detail", "steps", "usage"})
_LONGEST_BYTES = 1 << 20
_DETAIL_CHARS = 2000
_MOST_COUNTS = 64


class BadResult(Exception):
    """Not a result of the protocol; what was expected and found."""


def ending(ended: Ended) -> AgentEnding:
    """The result as it stands in the adapter's home; whatever is wrong with it is the adapter's error."""
    file = ended.home / RESULT
    try:
        return _checked(_loaded(file))
    except FileNotFoundError:
        word = KILLED if ended.returncode < 0 else NO_RESULT
        why = f"expected {RESULT} in its home; found none, and exit code {ended.returncode}: {ended.last_words()}"
    except BadResult as error:
        word, why = BAD_RESULT, f"{RESULT}: {error}; it ended with exit code {ended.returncode}"
    return AgentEnding(ENDINGS[word], why)


def _loaded(file: Path) -> dict[str, Any]:
    if file.is_symlink() or not file.is_file():
        raise FileNotFoundError(file)
    with file.open("rb") as stream:
        content = stream.read(_LONGEST_BYTES + 1)
    if len(content) > _LONGEST_BYTES:
        raise BadResult(f"expected at most {_LONGEST_BYTES} bytes; found more")
    try:
        told = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadResult(f"expected JSON; found {error}") from error
    if not isinstance(told, dict):
        raise BadResult(f"expected a JSON object; found {type(told).__name__}")
    return told


def _checked(told: Mapping[str, Any]) -> AgentEnding:
    if told.get("protocol") != PROTOCOL:
        raise BadResult(f"expected the protocol {PROTOCOL!r}; found {told.get('protocol')!r:.80}")
    if unknown := sorted(set(told) - _KEYS):
        raise BadResult(f"expected the keys {', '.join(sorted(_KEYS))}; found also {', '.join(unknown)[:200]}")
    said = told.get("end_reason")
    if not isinstance(said, str) or said not in {reason.value for reason in MAY_SAY}:
        raise BadResult(f"expected an end_reason of {', '.join(MAY_SAY)}; found {said!r:.80}")
    detail = told.get("detail", "")
    if not isinstance(detail, str):
        raise BadResult(f"expected a detail that is a text; found {type(detail).__name__}")
    return AgentEnding(
        EndReason(said), detail[:_DETAIL_CHARS], _steps(told.get("steps")), _usage(told.get("usage", {}))
    )


def _steps(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise BadResult(f"expected steps, a whole number from 0; found {value!r:.80}")
    return value


def _usage(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > _MOST_COUNTS:
        raise BadResult(f"expected usage, an object of at most {_MOST_COUNTS} counts; found {value!r:.80}")
    for name, count in value.items():
        whole = isinstance(count, int | float) and not isinstance(count, bool)
        if not whole or not 0 <= count < 1e15 or not math.isfinite(count):
            raise BadResult(f"expected usage {name!r:.40} to be a number from 0; found {count!r:.40}")
    return {name: float(count) for name, count in value.items()}
