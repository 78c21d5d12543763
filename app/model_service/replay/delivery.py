"""Getting an answer, or a fault, onto the wire: whole, streamed, slow, cut, never."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.model_service.dialects.base import DialectCodec, Reply, Request
from app.models.model_calls import REPLAY_HEADER, Dialect

_GARBAGE = b"<html><body>This is not the answer you are looking for.</body></html>"
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_IDS = {Dialect.CHAT: "chatcmpl-", Dialect.RESPONSES: "resp_", Dialect.MESSAGES: "msg_"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP error in the caller's dialect."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gets. `content` None: garbage."""

    content: Reply | Refusal | None
    id: str = ""
    delay_s: float = 0.0
    token_delay_s: float = 0.0
    cut: bool = False
    matched: str = "script"  # where it is from; told in a header


def refused(codec: DialectCodec, refusal: Refusal, matched: str = "script") -> Response:
    """The refusal as a response."""
    body = orjson.dumps(codec.error(refusal.status, refusal.code, refusal.message))
    headers = {REPLAY_HEADER: matched}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = f"{refusal.retry_after_s:g}"
    return Response(body, refusal.status, headers, "application/json")


class Delivery(Response):
    """Sends an `Answer`. Ends early when the caller hangs up, however long the silence was meant to be."""

    def __init__(self, answer: Answer, codec: DialectCodec, request: Request) -> None:
        # Starlette's own set-up is left out: the head is made when the silence is over.
        self._answer = answer
        self._codec = codec
        self._request = request
        self._id = f"{_IDS[codec.dialect]}{answer.id}"
        self._found = [(REPLAY_HEADER.encode(), answer.matched.encode())]
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._answer.delay_s and not await _silence(self._answer.delay_s, receive):
            return
        content = self._answer.content
        if content is None:
            await _send_whole(send, _GARBAGE, *self._found)
        elif isinstance(content, Refusal):
            await refused(self._codec, content, self._answer.matched)(scope, receive, send)
        elif self._request.stream:
            await self._stream(content, receive, send)
        else:
            await self._whole(content, receive, send)

    async def _whole(self, reply: Reply, receive: Receive, send: Send) -> None:
        body = orjson.dumps(self._codec.whole(reply, id=self._id, request=self._request))
        pause_s = self._answer.token_delay_s * _words(reply)
        if pause_s and not await _silence(pause_s, receive):
            return
        if self._answer.cut:
            await _send_head(send, _JSON, *self._found, length=len(body))
            await _send_part(send, body[: len(body) // 2])
            return  # unfinished: the server closes the connection
        await _send_whole(send, body, *self._found)

    async def _stream(self, reply: Reply, receive: Receive, send: Send) -> None:
        events = self._codec.events(reply, id=self._id, request=self._request)
        if self._answer.cut:
            events = _first_half(events)
        await _send_head(send, _EVENTS, *self._found)
        pause_s = self._answer.token_delay_s
        for event in events:
            if pause_s and not await _silence(pause_s, receive):
                return
            await _send_part(send, event)
        if not self._answer.cut:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _first_half(events: Iterator[bytes]) -> Iterator[bytes]:
    known = list(events)
    middle = max(1, len(known) // 2)
    yield from known[:middle]
    yield known[middle][: len(known[middle]) // 2] if middle < len(known) else b""


def _words(reply: Reply) -> int:
    message = reply.message
    calls = message.get("tool_calls") or ()
    return len(str(message.get("content") or "").split()) + sum(len(str(call["arguments"]).split()) for call in calls)


async def _silence(seconds: float, receive: Receive) -> bool:
    """Wait; False when the caller has hung up."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
            return False
    return True


_Header = tuple[bytes, bytes]


async def _send_whole(send: Send, body: bytes, *headers: _Header) -> None:
    await _send_head(send, _JSON, *headers, length=len(body))
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_head(send: Send, *headers: _Header, length: int | None = None) -> None:
    told = list(headers) if length is None else [*headers, (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": told})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def body_of(request: HttpRequest, most: int) -> bytes | None:
    """The request's body; None when it is longer than `most` bytes."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)
