"""Classifies errors of engines that occur before the first byte reaches the caller."""

from __future__ import annotations

import errno
import math
import re
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any

import aiohttp
import orjson

from app.model_service.dialects.reading import parse_json
from app.models.model_calls import CallEnd, Dialect


class FaultKind(Enum):
    """Kind of an engine's error. It alone decides how the error is handled."""

    DOWN = auto()  # no connection: wait until it is back, or go elsewhere
    RESET = auto()  # the connection broke
    TIMEOUT = auto()  # no byte within the engine's timeout
    BUSY = auto()  # the engine reports overload
    BROKEN = auto()  # 5xx, or an invalid answer
    FINAL = auto()  # a retry would be refused again
    DIALECT = auto()  # the engine does not know the path of this dialect
    PRIORITY = auto()  # the engine has the field, but its scheduler does not use it


@dataclass(eq=False)
class EngineFault(Exception):
    """A failed request to an engine."""

    kind: FaultKind
    why: str
    _: KW_ONLY
    status: int = 502
    content: bytes = b""
    """The engine's response body, if it sent one."""
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return self.why


def fault_of_error(error: Exception, patience_s: float) -> EngineFault:
    """Converts an exception of the HTTP client. `patience_s`: seconds that an engine may send nothing."""
    name = type(error).__name__
    text = str(error) or name
    match error:
        case aiohttp.ClientSSLError():
            return EngineFault(FaultKind.FINAL, f"the engine's certificate is not accepted: {text}")
        case aiohttp.ClientConnectorError(os_error=OSError(errno=errno.EACCES)):  # all its addresses are forbidden
            return EngineFault(FaultKind.FINAL, f"the engine may not be called: {error.strerror}", status=403)
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return EngineFault(FaultKind.DOWN, f"the engine takes no connections: {text}", status=503)
        case aiohttp.SocketTimeoutError() | TimeoutError():
            return EngineFault(FaultKind.TIMEOUT, f"the engine said nothing for {patience_s:g} s", status=504)
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | OSError():
            return EngineFault(FaultKind.RESET, f"the engine closed the connection before it had answered ({name})")
        case _:
            return EngineFault(FaultKind.BROKEN, f"the engine answered something that is no HTTP: {text[:200]}")


BUSY = frozenset({429, 503, 529})
_NO_SUCH_MODEL = ("model_not_found", "recording_unknown", "scenario_unknown")
_TOO_LONG = re.compile(
    r"context_length_exceeded|maximum context length|prompt is too long|context window|context limit"
    r"|longer than the model's context|available context size|maximum allowed (?:input )?length|input is too long"
    r"|maximum input length|max_model_len",
    re.IGNORECASE,
)
_MESSAGE_MOST = 2000


@dataclass(frozen=True, slots=True)
class EngineMessage:
    """Error code and message of an engine."""

    code: str
    message: str


def message_of(content: bytes) -> EngineMessage:
    """Reads the error from any engine's error body, also from a body that is not JSON."""
    try:
        body: Any = orjson.loads(content)
    except ValueError:
        return EngineMessage("", content[:_MESSAGE_MOST].decode(errors="replace").strip() or "an empty body")
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or error.get("msg")
        code = error.get("code") or error.get("type") or ""
        if message is not None:
            return EngineMessage(str(code), (message if isinstance(message, str) else str(message))[:_MESSAGE_MOST])
    return EngineMessage(
        "", error[:_MESSAGE_MOST] if isinstance(error, str) else content[:_MESSAGE_MOST].decode(errors="replace")
    )


def end_of(status: int, error: EngineMessage, model: str) -> CallEnd:
    """Returns the recorded end of a call for a final answer of this status. model: its name as sent to the engine."""
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


def too_long(error: EngineMessage) -> bool:
    """Whether the engine reports that the conversation does not fit its model."""
    return error.code == "context_length_exceeded" or _TOO_LONG.search(error.message) is not None


def unknown_model(status: int, error: EngineMessage, model: str) -> bool:
    """Whether the engine reports that it does not have the model."""
    if status not in {400, 404} or error.code == "recording_miss":
        return False
    named = status == 404 and "model" in error.message.lower() and model in error.message
    return error.code in _NO_SUCH_MODEL or named


def no_such_path(status: int, content: bytes, model: str) -> bool:
    """Whether the server does not know the path, as opposed to not knowing the model."""
    if status not in {404, 405, 501}:
        return False
    text = content[:_MESSAGE_MOST].decode(errors="replace")
    return model not in text and "model_not_found" not in text


def retry_after_s(value: str | None, most: float) -> float | None:
    """Parses the header into seconds, at most `most`. None: it is missing or not readable."""
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


_EVENT_BYTES = 1 << 20
_ANSWERS_HAVE = {Dialect.CHAT: "choices", Dialect.RESPONSES: "output", Dialect.MESSAGES: "content"}


async def whole_of(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """Reads the body. None: it is longer than `most` bytes."""
    length = response.content_length
    if length is not None and length <= most:
        return await response.read()
    pieces: list[bytes] = []
    size = 0
    while piece := await response.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            return None
    return b"".join(pieces)


def check_answer(dialect: Dialect, content: bytes) -> None:
    """Raises: EngineFault: this is no answer of that dialect, whatever its status says."""
    try:
        body = parse_json(content)
    except ValueError:
        shown = content[:80].decode(errors="replace")
        raise EngineFault(
            FaultKind.BROKEN, f"the engine answered 200 with something that is no JSON: {shown!r}"
        ) from None
    if not isinstance(body, dict) or _ANSWERS_HAVE[dialect] not in body:
        shown = content[:200].decode(errors="replace")
        raise EngineFault(FaultKind.BROKEN, f"the engine answered 200 without `{_ANSWERS_HAVE[dialect]}`: {shown!r}")


async def first_event(response: aiohttp.ClientResponse, first: bytes) -> bytes:
    """Reads the stream up to the end of its first event, with a size limit."""
    while not any(mark in first for mark in (b"\n\n", b"\n\r\n", b"\r\r")) and len(first) < _EVENT_BYTES:
        piece = await response.content.readany()
        if not piece:
            break
        first += piece
    return first


def fault_of_event(first: bytes) -> EngineFault:
    """Converts an error at the beginning of a stream, as if it were an error status."""
    data = first[first.find(b"{") :].partition(b"\n")[0]
    error = message_of(data)
    status = int(error.code) if error.code.isdecimal() and 400 <= int(error.code) < 600 else 500
    if too_long(error):
        return EngineFault(FaultKind.FINAL, error.message, status=400, content=data)
    kind = FaultKind.BUSY if status in BUSY else FaultKind.FINAL if status < 500 else FaultKind.BROKEN
    return EngineFault(kind, f"the engine's stream began with an error: {error.message}", status=status, content=data)


def is_json(content: bytes) -> bool:
    try:
        return isinstance(orjson.loads(content), dict)
    except ValueError:
        return False
