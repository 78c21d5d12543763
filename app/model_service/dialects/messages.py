"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from app.model_service.dialects import messages_reading as reading
from app.model_service.dialects import messages_writing as writing
from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.dialects.parts import content_of, event, parts_of
from app.model_service.dialects.reading import (
    as_answer,
    as_request,
    body_of,
    inside,
    listed,
    model_of,
    number,
    objects_of,
    says,
)
from app.models.model_calls import Dialect, TokenUse

_OF = "Anthropic's messages"
_OWN = frozenset({"model", "messages", "system", "tools", "stream", "max_tokens"})
_DEFAULT_MAX_TOKENS = 4096  # the dialect has no request without
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
TOO_LONG = "prompt is too long"
"""Clients look for these words."""


class MessagesCodec:
    """`Dialect.MESSAGES`."""

    dialect: ClassVar[Dialect] = Dialect.MESSAGES

    # --- Reading ----------------------------------------------------------------------------------------------------

    def request(self, body: Mapping[str, Any]) -> Request:
        with as_request(_OF):
            messages: list[Message] = []
            if system := content_of(body.get("system")):
                messages.append({"role": "system", "content": system})
            for one in objects_of(body, "messages", _OF):
                messages.extend(reading.messages_of(one))
            return Request(
                model=model_of(body, _OF),
                messages=tuple(messages),
                tools=tuple(reading.tool_from(tool) for tool in listed(body.get("tools"))),
                stream=bool(body.get("stream")),
                max_tokens=number(body.get("max_tokens")),
                parameters={key: value for key, value in body.items() if key not in _OWN},
            )

    def reply(self, content: bytes, *, streamed: bool) -> Reply:
        with as_answer(_OF):
            return reading.of_stream(content) if streamed else reading.of_body(body_of(content))

    def usage(self, content: bytes, *, streamed: bool) -> TokenUse:
        try:
            if not streamed:
                return reading.usage_of(body_of(content).get("usage"))
            told: dict[str, Any] = {}
            for one in says(content, b"usage"):
                reading.tell_usage(told, one)
            return reading.usage_of(told)
        except ValueError:
            return TokenUse()

    # --- Writing ----------------------------------------------------------------------------------------------------

    def limited(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        wished = number(body.get("max_tokens"))
        found = {**body, "max_tokens": max_tokens if wished is None else min(wished, max_tokens)}
        if inside(body.get("thinking"), "type") == "enabled":
            found["thinking"] = reading.fitting(body["thinking"], found["max_tokens"])
        return found

    def renamed(self, body: dict[str, Any], model: str) -> dict[str, Any]:
        return {**body, "model": model}

    def body(self, request: Request) -> dict[str, Any]:
        told = [one for one in request.messages if one["role"] == "system"]
        found: dict[str, Any] = {
            "model": request.model,
            "max_tokens": request.max_tokens or _DEFAULT_MAX_TOKENS,
            "messages": list(writing.turns(request)),
            **request.parameters,
        }
        if told:
            found["system"] = [part for one in told for part in parts_of(one["content"])]
        if request.tools:
            found["tools"] = [writing.written_tool(tool) for tool in request.tools]
        if request.stream:
            found["stream"] = True
        return found

    def whole(self, reply: Reply, *, id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        body = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": reply.model or request.model,
            "content": list(writing.blocks(reply.message)),
            "stop_reason": _STOP_REASONS.get(reply.finish_reason),
            "stop_sequence": None,
            "usage": writing.usage_told(reply.usage),
        }
        return body | (writing.token_fields(reply) if request.parameters.get("return_token_ids") else {})

    def events(self, reply: Reply, *, id: str, request: Request) -> Iterator[bytes]:  # noqa: A002
        usage = writing.usage_told(reply.usage)
        whole = self.whole(reply, id=id, request=request)
        start = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        yield event({"type": "message_start", "message": start}, "message_start")
        for at, block in enumerate(whole["content"]):
            opened, deltas = writing.streamed(block)
            yield event({"type": "content_block_start", "index": at, "content_block": opened}, "content_block_start")
            for delta in deltas:
                yield event({"type": "content_block_delta", "index": at, "delta": delta}, "content_block_delta")
            yield event({"type": "content_block_stop", "index": at}, "content_block_stop")
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield event({"type": "message_delta", "delta": end, "usage": usage}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        if code == "context_length_exceeded" and TOO_LONG not in message:
            message = f"{TOO_LONG}: {message}"
        kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code}}

    def error_event(self, status: int, code: str, message: str) -> bytes:
        return event(self.error(status, code, message), "error")
