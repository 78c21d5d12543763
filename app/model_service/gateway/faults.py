"""What an engine's refusal means: whose fault it is, and whether the conversation no longer fits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from app.models.model_calls import CallEnd

BUSY = frozenset({429, 503, 529})
_TOO_LONG = re.compile(
    r"context_length_exceeded|maximum context length|prompt is too long|context window|context limit"
    r"|longer than the model's context|available context size|maximum allowed (?:input )?length|input is too long"
    r"|maximum input length|max_model_len",
    re.IGNORECASE,
)
_SAID_MOST = 2000


@dataclass(frozen=True, slots=True)
class Said:
    """An engine's error in its own words."""

    code: str
    message: str


def said(content: bytes) -> Said:
    """From any engine's error body; also from one that is no JSON."""
    try:
        body: Any = orjson.loads(content)
    except ValueError:
        return Said("", content[:_SAID_MOST].decode(errors="replace").strip() or "an empty body")
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or error.get("msg")
        code = error.get("code") or error.get("type") or ""
        if message is not None:
            return Said(str(code), (message if isinstance(message, str) else str(message))[:_SAID_MOST])
    return Said("", error[:_SAID_MOST] if isinstance(error, str) else content[:_SAID_MOST].decode(errors="replace"))


def end_of(status: int, error: Said, model: str) -> CallEnd:
    """What a final answer of this status is, in the record. model: its name as the engine was asked."""
    if status in {400, 413, 422} and too_long(error):
        return CallEnd.CONTEXT_EXHAUSTED
    if status in {401, 403}:
        return CallEnd.UNAUTHORISED
    if unknown_model(status, error, model):
        return CallEnd.NOT_FOUND
    if status in BUSY:
        return CallEnd.UPSTREAM_BUSY
    if status in {408, 504}:
        return CallEnd.UPSTREAM_TIMEOUT
    return CallEnd.REFUSED if 400 <= status < 500 else CallEnd.UPSTREAM_ERROR


def too_long(error: Said) -> bool:
    """Whether the engine says that the conversation does not fit its model."""
    return error.code == "context_length_exceeded" or _TOO_LONG.search(error.message) is not None


def unknown_model(status: int, error: Said, model: str) -> bool:
    """Whether the engine says that it does not have the model."""
    if status not in {400, 404} or error.code == "recording_miss":
        return False
    named = status == 404 and "model" in error.message.lower() and model in error.message
    return error.code == "model_not_found" or named


def no_such_path(status: int, content: bytes, model: str) -> bool:
    """Whether this is a server that does not know the path, and not one that does not know the model."""
    if status not in {404, 405, 501}:
        return False
    text = content[:_SAID_MOST].decode(errors="replace")
    return model not in text and "model_not_found" not in text


def retry_after_s(value: str | None, most: float) -> float | None:
    """Of the header, at most `most`; None: it says nothing that can be read."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
        except (ValueError, TypeError):
            return None
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return min(max(0.0, seconds), most) if math.isfinite(seconds) else None
