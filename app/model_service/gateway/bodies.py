"""Reading what a caller sends, with a bound, and saying what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.types import Receive

from app.model_service.dialects.reading import parsed
from app.model_service.gateway.refusals import Refusal, malformed

BODY_BYTES = 32 << 20
"""The largest request. Longer conversations fit no model; images go by URL or in pieces."""


class ClientGone(Exception):
    """The caller hung up."""


async def read_body(receive: Receive, headers: Iterable[tuple[bytes, bytes]], most: int) -> bytes:
    """The whole body. Raises: Refusal: longer than `most`, of which no more is kept; ClientGone."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > most:
            raise _too_large(int(value), most)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        return _within(body, most)
    pieces = [body]
    size = len(body)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most:
            raise _too_large(size, most)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _within(body: bytes, most: int) -> bytes:
    if len(body) > most:
        raise _too_large(len(body), most)
    return body


def _too_large(found: int, most: int) -> Refusal:
    return malformed(
        "request_too_large",
        f"expected a request of at most {most:,} bytes, found {found:,} or more; shorten the conversation",
        status=413,
    )


def read_request(raw: bytes) -> dict[str, Any]:
    """The request as an object with a model's name; also of agents that write half characters or NaN.

    Raises: Refusal: what was expected and what was found.
    """
    try:
        body = parsed(raw)
    except ValueError as error:
        found = f"{str(error)[:200]}, beginning {raw[:60].decode(errors='replace')!r}" if raw else "an empty body"
        raise malformed("invalid_json", f"expected a JSON object, found {found}") from None
    if not isinstance(body, dict):
        raise malformed("invalid_request", f"expected a JSON object, found {_kind(body)}")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise malformed("invalid_request", f"expected `model`, the name of one, found {_kind(model)}")
    return body


def _kind(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case dict():
            return "an object"
        case list():
            return "a list"
        case "":
            return "an empty text"
        case str():
            return "a text"
        case _:
            return f"{value!r:.60}"
