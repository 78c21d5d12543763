"""Reading what an engine sent: with bounds, and whether it is what its status says."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import orjson

from app.model_service.dialects.reading import parsed
from app.model_service.gateway import faults
from app.model_service.gateway.troubles import Kind, Trouble
from app.models.model_calls import Dialect

_EVENT_BYTES = 1 << 20
_ANSWERS_HAVE = {Dialect.CHAT: "choices", Dialect.RESPONSES: "output", Dialect.MESSAGES: "content"}


async def whole_of(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body; None: it is longer than that."""
    length = response.content_length
    if length is not None and length <= most:
        return await response.read()
    pieces: list[bytes] = []
    size = 0
    async for piece in pieces_of(response):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            return None
    return b"".join(pieces)


async def pieces_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    while piece := await response.content.readany():
        yield piece


def check(dialect: Dialect, content: bytes) -> None:
    """Raises: Trouble: this is no answer of that dialect, whatever its status says."""
    try:
        body = parsed(content)
    except ValueError:
        shown = content[:80].decode(errors="replace")
        raise Trouble(Kind.BROKEN, f"the engine answered 200 with something that is no JSON: {shown!r}") from None
    if not isinstance(body, dict) or _ANSWERS_HAVE[dialect] not in body:
        shown = content[:200].decode(errors="replace")
        raise Trouble(Kind.BROKEN, f"the engine answered 200 without `{_ANSWERS_HAVE[dialect]}`: {shown!r}")


async def first_event(response: aiohttp.ClientResponse, first: bytes) -> bytes:
    """The stream up to the end of its first event, with a bound."""
    while not any(mark in first for mark in (b"\n\n", b"\n\r\n", b"\r\r")) and len(first) < _EVENT_BYTES:
        piece = await response.content.readany()
        if not piece:
            break
        first += piece
    return first


def of_event(first: bytes) -> Trouble:
    """A stream that begins with an error is as good as a status."""
    data = first[first.find(b"{") :].partition(b"\n")[0]
    said = faults.said(data)
    status = int(said.code) if said.code.isdecimal() and 400 <= int(said.code) < 600 else 500
    if faults.too_long(said):
        return Trouble(Kind.FINAL, said.message, status=400, content=data)
    kind = Kind.BUSY if status in faults.BUSY else Kind.FINAL if status < 500 else Kind.BROKEN
    return Trouble(kind, f"the engine's stream began with an error: {said.message}", status=status, content=data)


def is_json(content: bytes) -> bool:
    try:
        return isinstance(orjson.loads(content), dict)
    except ValueError:
        return False
