"""OpenAI's chat completions, with what vLLM and SGLang add: thoughts, token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from app.model_service.dialects import chat_reading as reading
from app.model_service.dialects import chat_writing as writing
from app.model_service.dialects.base import Reply, Request
from app.model_service.dialects.parts import dealt, event
from app.model_service.dialects.reading import (
    as_answer,
    as_request,
    body_of,
    inside,
    model_of,
    number,
    objects_of,
    said,
    says,
)
from app.models.model_calls import Dialect, TokenUse

_OF = "chat completions"
_OWN = frozenset({"model", "messages", "tools", "functions", "stream", "max_tokens", "max_completion_tokens"})
_MODERN = re.compile(r"(openai/)?(o\d|gpt-([5-9]|\d\d))")
"""OpenAI's models that refuse `max_tokens`; engines of one's own know no other word."""
TOO_LONG = "This model's maximum context length is exceeded"
"""Clients look for these words."""
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ChatCodec:
    """`Dialect.CHAT`."""

    dialect: ClassVar[Dialect] = Dialect.CHAT

    # --- Reading ----------------------------------------------------------------------------------------------------

    def request(self, body: Mapping[str, Any]) -> Request:
        with as_request(_OF):
            wishes = [
                w for name in ("max_completion_tokens", "max_tokens") if (w := number(body.get(name))) is not None
            ]
            return Request(
                model=model_of(body, _OF),
                messages=tuple(reading.message_of(one) for one in objects_of(body, "messages", _OF)),
                tools=tuple(reading.tools_of(body)),
                stream=bool(body.get("stream")),
                max_tokens=min(wishes, default=None),
                parameters={key: value for key, value in body.items() if key not in _OWN},
            )

    def reply(self, content: bytes, *, streamed: bool) -> Reply:
        with as_answer(_OF):
            return reading.of_stream(content) if streamed else reading.of_body(body_of(content))

    def usage(self, content: bytes, *, streamed: bool) -> TokenUse:
        try:
            told = says(content, b"usage") if streamed else [body_of(content)]
        except ValueError:
            return TokenUse()
        return next(
            (reading.usage_of(one["usage"]) for one in reversed(told) if isinstance(one.get("usage"), dict)), TokenUse()
        )

    # --- Writing ----------------------------------------------------------------------------------------------------

    def limited(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        wished = [name for name in ("max_completion_tokens", "max_tokens") if number(body.get(name)) is not None]
        if not wished:
            modern = _MODERN.match(said(body.get("model")))
            return {**body, "max_completion_tokens" if modern else "max_tokens": max_tokens}
        return {**body, **{name: min(int(body[name]), max_tokens) for name in wished}}

    def renamed(self, body: dict[str, Any], model: str) -> dict[str, Any]:
        return {**body, "model": model}

    def body(self, request: Request) -> dict[str, Any]:
        tools = [{"type": "function", "function": dict(tool)} for tool in request.tools]
        found = {
            "model": request.model,
            "messages": [writing.written(one) for one in request.messages],
            **request.parameters,
        }
        if tools:
            found["tools"] = tools
        if request.stream:
            found["stream"] = True
        return found if request.max_tokens is None else self.limited(found, request.max_tokens)

    def whole(self, reply: Reply, *, id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        ids = bool(request.parameters.get("return_token_ids"))
        choice: dict[str, Any] = {
            "index": 0,
            "message": writing.written(reply.message),
            "logprobs": writing.logprobs_of(reply.logprobs, reply.token_ids)
            if request.parameters.get("logprobs")
            else None,
            "finish_reason": reply.finish_reason or None,
        }
        body = {**writing.head(reply, id, request), "object": "chat.completion", "choices": [choice]}
        if (told := writing.usage_told(reply.usage)) is not None:
            body["usage"] = told
        if ids:
            choice["token_ids"] = writing.as_list(reply.token_ids)
            body["prompt_token_ids"] = writing.as_list(reply.prompt_token_ids)
        return body

    def events(self, reply: Reply, *, id: str, request: Request) -> Iterator[bytes]:  # noqa: A002
        ids, scores = bool(request.parameters.get("return_token_ids")), bool(request.parameters.get("logprobs"))
        head = {**writing.head(reply, id, request), "object": "chat.completion.chunk"}
        first = {**head, "prompt_token_ids": writing.as_list(reply.prompt_token_ids)} if ids else head
        yield event({**first, "choices": [writing.choice({"role": "assistant", "content": ""})]})
        deltas = list(writing.deltas(reply.message)) or [{"content": ""}]
        dealt_ids, dealt_scores = dealt(reply.token_ids, len(deltas)), dealt(reply.logprobs, len(deltas))
        for delta, token_ids, logprobs in zip(deltas, dealt_ids, dealt_scores, strict=True):
            choice = writing.choice(delta)
            if ids and reply.token_ids is not None:
                choice["token_ids"] = token_ids
            if scores and reply.logprobs is not None:
                choice["logprobs"] = writing.logprobs_of(logprobs, token_ids)
            yield event({**head, "choices": [choice]})
        yield event({**head, "choices": [writing.choice({}, reply.finish_reason or None)]})
        if inside(request.parameters.get("stream_options"), "include_usage") and (
            told := writing.usage_told(reply.usage)
        ):
            yield event({**head, "choices": [], "usage": told})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        return error_body(status, code, message)

    def error_event(self, status: int, code: str, message: str) -> bytes:
        return event(error_body(status, code, message))


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it, in both of its dialects."""
    if code == "context_length_exceeded" and "maximum context length" not in message:
        message = f"{TOO_LONG}: {message}"
    kind = _ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
