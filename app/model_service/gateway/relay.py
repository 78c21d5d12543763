"""Relays an engine's stream, and detects whether it was complete."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing

import aiohttp

from app.model_service.gateway.plans import EngineAnswer
from app.models.model_calls import CallEnd, Dialect

RECORDED_BYTES = 32 << 20
"""Bytes of one stream to record. Later bytes are passed on, but only the last part of them is recorded."""
TAIL_BYTES = 128 << 10
"""Bytes to record at the end of a longer stream: engines report the tokens in one of the last events."""
_CARRY = 48
"""Bytes carried over to the next piece. More than any marker, which may be split across two pieces."""
_ERROR_LINE_BYTES = 1 << 20


def _lines(*starts: bytes) -> tuple[bytes, ...]:
    """Returns the line starts with and without the blank after the colon, which the format leaves open."""
    return tuple(b"\n" + one for start in starts for one in (start, start.replace(b": ", b":", 1)))


def _kinds(*kinds: bytes) -> tuple[bytes, ...]:
    return tuple(b'"type":' + blank + b'"' + kind + b'"' for kind in kinds for blank in (b"", b" "))


_ENDS: dict[Dialect, tuple[bytes, ...]] = {
    Dialect.CHAT: _lines(b"data: [DONE]"),
    Dialect.MESSAGES: (*_lines(b"event: message_stop"), *_kinds(b"message_stop")),
    Dialect.RESPONSES: (
        *_lines(b"event: response.completed", b"event: response.incomplete"),
        *_kinds(b"response.completed", b"response.incomplete"),
    ),
}
_ERRORS: dict[Dialect, tuple[bytes, ...]] = {
    Dialect.CHAT: _lines(b'data: {"error"', b"event: error"),
    Dialect.MESSAGES: _lines(b"event: error"),
    Dialect.RESPONSES: (*_lines(b"event: error", b"event: response.failed"), *_kinds(b"response.failed")),
}
"""Markers of errors. A model's text cannot contain them: JSON has no line ends inside, and quotes are escaped."""


def begins_with_error(dialect: Dialect, first: bytes) -> bool:
    """Whether the first event of a stream is an error."""
    return (b"\n" + first.lstrip(b"\r\n")).startswith(_ERRORS[dialect])


class RelayedStream:
    """Stream of an engine: its pieces one by one, and its state at any time."""

    def __init__(self, answer: EngineAnswer) -> None:
        self.end = CallEnd.CUT
        self.detail = "the engine's stream was left before its end"
        self.seen_end = False
        self.cut_off = False  # not all of it was recorded
        self._answer = answer
        self._ends = _ENDS[answer.plan.dialect]
        self._errors = _ERRORS[answer.plan.dialect]
        self._carry = b"\n"
        self._failed = False
        self._unsent = b""  # part of a line that may show a key
        self._recorded: list[bytes] = []
        self._tail = b""
        self._size = 0

    @property
    def recorded(self) -> bytes:
        """The bytes that the engine sent; of a very long stream the beginning and the end, both in whole lines."""
        head = b"".join(self._recorded)
        if not self.cut_off:
            return head
        return head[: head.rfind(b"\n") + 1] + b"\n" + self._tail[self._tail.find(b"\n") + 1 :]

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the pieces as they come, without keys in errors. Stops where the stream ends; `end` has the reason."""
        response = self._answer.response
        piece = self._answer.content
        end, detail = CallEnd.CUT, "the engine ended its stream before its answer was complete"
        while piece:
            piece = self._inspect(piece)
            if piece:
                self._record(piece)
                yield piece
            if response is None:
                break
            try:
                piece = await response.content.readany()
            except (aiohttp.SocketTimeoutError, TimeoutError):
                end, detail = CallEnd.UPSTREAM_TIMEOUT, "the engine fell silent in the middle of its answer"
                break
            except (aiohttp.ClientError, OSError) as error:
                detail = f"the engine closed the connection in the middle of its answer ({type(error).__name__})"
                break
        if not self._failed and not self.seen_end:
            self.end, self.detail = end, detail
        if self._unsent:
            piece, self._unsent = self._answer.redact(self._unsent), b""
            self._record(piece)
            yield piece

    def _inspect(self, piece: bytes) -> bytes:
        """Returns the part of a piece that may be passed on now."""
        if self._failed:
            return self._without_keys(piece)
        text = self._carry + piece
        seen = text if b"\r" not in text else text.replace(b"\r", b"\n")  # JSON escapes both, so each ends a line
        self._carry = text[-_CARRY:]
        if not self.seen_end and any(mark in seen for mark in self._ends):
            self.seen_end = True
            self.end, self.detail = CallEnd.ANSWERED, ""
        if any(mark in seen for mark in self._errors):
            self._failed = True
            self.end = CallEnd.UPSTREAM_ERROR
            self.detail = "the engine reported an error in the middle of its answer"
            return self._without_keys(piece)
        return piece

    def _without_keys(self, piece: bytes) -> bytes:
        """Returns whole lines only: engines repeat a refused key, and it may be split across two pieces."""
        text = self._unsent + piece
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if len(text) - end > _ERROR_LINE_BYTES:
            end = len(text)
        self._unsent = text[end:]
        return self._answer.redact(text[:end])

    def _record(self, piece: bytes) -> None:
        if not self.cut_off and self._size + len(piece) <= RECORDED_BYTES:
            self._recorded.append(piece)
            self._size += len(piece)
        else:
            self.cut_off = True
            self._tail = (self._tail + piece)[-TAIL_BYTES:]


_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
_NO_CHOICES = re.compile(rb'"choices": ?\[\]')
_EVENT = re.compile(rb".*?(?:\n\n|\n\r\n|\r\r)", re.DOTALL)


async def without_usage(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Removes the usage, the last event, from a chat stream: the caller did not request it and may not know it."""
    rest = b""
    async with aclosing(pieces) as source:  # type: ignore[type-var]
        async for piece in source:
            rest += piece
            end = max(at + len(mark) if (at := rest.rfind(mark)) >= 0 else 0 for mark in _BLANK_LINES)
            if not end:
                continue
            whole, rest = rest[:end], rest[end:]
            if _NO_CHOICES.search(whole):
                events = _EVENT.findall(whole)
                whole = b"".join(one for one in events if not (b'"usage"' in one and _NO_CHOICES.search(one)))
            if whole:
                yield whole
    if rest:
        yield rest
