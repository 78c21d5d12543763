"""The dialect of Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.model_service.dialects.base import (
    TOKENS,
    DialectCodec,
    Message,
    Reply,
    Request,
    as_object,
    as_text,
    assistant,
    call_of,
    content_of,
    event,
    is_text,
    parts_of,
    pieces,
    text_of,
    to_json,
    token_fields,
    tokens_in,
    tool_of,
)
from app.model_service.dialects.reading import (
    events_of,
    excerpt,
    known_usage,
    list_or_empty,
    objects_of,
    text_or_empty,
    token_count,
    value_at,
)
from app.models.model_calls import Dialect, TokenUse

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
"""Text that clients look for."""


class MessagesCodec(DialectCodec):
    """Codec of `Dialect.MESSAGES`."""

    dialect = Dialect.MESSAGES
    title = "Anthropic's messages"
    own_keys = frozenset({"model", "messages", "system", "tools", "stream", "max_tokens"})

    def _messages(self, body: Mapping[str, Any]) -> Iterator[Message]:
        if system := content_of(body.get("system")):
            yield {"role": "system", "content": system}
        for one in objects_of(body, "messages", self.title):
            yield from _messages_of(one)

    def _tools(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for tool in list_or_empty(body.get("tools")):
            if isinstance(tool.get("input_schema"), dict):
                yield tool_of(tool.get("name"), tool.get("description"), tool["input_schema"])
            else:
                yield tool_of(tool.get("name") or tool.get("type"), "", None, given=dict(tool))

    def _max_tokens(self, body: Mapping[str, Any]) -> int | None:
        return token_count(body.get("max_tokens"))

    def _of_body(self, body: Mapping[str, Any]) -> Reply:
        if body.get("type") == "error" or not isinstance(body.get("content"), list):
            raise ValueError(f"expected an answer with content; found {str(body.get('error') or body)[:200]}")
        reason = body.get("stop_reason")
        return Reply(
            message=_assistant(body["content"]),
            finish_reason=_FINISHES.get(text_or_empty(reason), "stop" if reason else ""),
            usage=usage_of(body.get("usage")),
            model=text_or_empty(body.get("model")),
            **tokens_in(body),
        )

    def _of_stream(self, content: bytes) -> Reply:
        start: dict[str, Any] = {}
        blocks: dict[int, dict[str, Any]] = {}
        usage: dict[str, Any] = {}
        reason, failed = None, ""
        for one in events_of(content):
            update_usage(usage, one)
            match one.get("type"):
                case "message_start":
                    start = dict(one["message"])
                case "content_block_start":
                    blocks[one["index"]] = dict(one["content_block"])
                case "content_block_delta":
                    _add(blocks.setdefault(one["index"], {}), one["delta"])
                case "message_delta":
                    reason = one["delta"].get("stop_reason") or reason
                case kind if kind == TOKENS:
                    start = one | start
                case "error":
                    failed = str(one.get("error"))[:200]
        if not start:
            raise ValueError(f"expected a stream that begins with message_start; found {failed or excerpt(content)}")
        for block in blocks.values():
            if isinstance(text := block.pop("json", None), str):
                block["input"] = text
        body = {**start, "content": [blocks[at] for at in sorted(blocks)], "stop_reason": reason, "usage": usage}
        reply = self._of_body(body)
        return replace(reply, complete=bool(reason) and not failed)

    def _usage(self, bodies: Sequence[Mapping[str, Any]]) -> TokenUse:
        usage: dict[str, Any] = {}
        for one in bodies:
            update_usage(usage, one)
        return usage_of(usage)

    def with_max_tokens(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        limit = token_count(body.get("max_tokens"))
        request = {**body, "max_tokens": max_tokens if limit is None else min(limit, max_tokens)}
        if value_at(body.get("thinking"), "type") == "enabled":
            request["thinking"] = fit_thinking(body["thinking"], request["max_tokens"])
        return request

    def whole(self, reply: Reply, *, id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        body = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": reply.model or request.model,
            "content": list(assistant_blocks(reply.message)),
            "stop_reason": _STOP_REASONS.get(reply.finish_reason),
            "stop_sequence": None,
            "usage": usage_fields(reply.usage),
        }
        return body | (token_fields(reply) if request.parameters.get("return_token_ids") else {})

    def events(self, reply: Reply, *, id: str, request: Request) -> Iterator[bytes]:  # noqa: A002
        usage = usage_fields(reply.usage)
        whole = self.whole(reply, id=id, request=request)
        start = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        yield event({"type": "message_start", "message": start}, "message_start")
        for at, block in enumerate(whole["content"]):
            opened, deltas = block_events(block)
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


_LEAST_THOUGHT = 1024  # tokens; a smaller budget for thinking is refused
_FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def _messages_of(one: Mapping[str, Any]) -> Iterator[Message]:
    """Splits a message of this dialect: tool results, which are in a user's message here, become messages."""
    role, content = one["role"], one.get("content")
    if role == "assistant":
        yield _assistant(content)
        return
    if not isinstance(role, str):
        raise TypeError(f"a message's role is {role!r}")
    others: list[Any] = []
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            others.append(block)
            continue
        if before := content_of(others):
            yield {"role": role, "content": before}
        others = []
        yield _result(block)
    if (rest := content_of(others)) or len(blocks) == len(others):
        yield {"role": role, "content": rest}


def _result(block: Mapping[str, Any]) -> Message:
    message: Message = {
        "role": "tool",
        "content": content_of(block.get("content")),
        "tool_call_id": str(block.get("tool_use_id") or ""),
    }
    if block.get("is_error"):
        message["is_error"] = True
    return message


def _assistant(content: object) -> Message:
    if not isinstance(content, list):
        return assistant(content_of(content))
    rest, thoughts, calls, signature = [], [], [], ""
    for block in content:
        kind = value_at(block, "type")
        if kind == "thinking":
            thoughts.append(text_or_empty(block.get("thinking")))
            signature = signature or text_or_empty(block.get("signature"))
        elif kind == "tool_use":
            calls.append(call_of(block.get("id"), block.get("name"), as_text(block.get("input"))))
        else:
            rest.append(block)
    message = assistant(content_of(rest), reasoning="".join(thoughts), tool_calls=calls)
    if signature:
        message["reasoning_signature"] = signature  # Anthropic's, over the thoughts, which it needs back
    return message


def fit_thinking(thinking: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Reduces the budget for thinking below the limit of the answer, or disables thinking."""
    budget = token_count(thinking.get("budget_tokens"))
    if budget is None or budget < max_tokens:
        return dict(thinking)
    if max_tokens <= _LEAST_THOUGHT:
        return {"type": "disabled"}
    return {**thinking, "budget_tokens": max(_LEAST_THOUGHT, max_tokens // 2)}


def _add(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    match delta.get("type"):
        case "text_delta":
            block.setdefault("type", "text")
            block["text"] = text_or_empty(block.get("text")) + delta["text"]
        case "thinking_delta":
            block.setdefault("type", "thinking")
            block["thinking"] = text_or_empty(block.get("thinking")) + delta["thinking"]
        case "signature_delta":
            block["signature"] = text_or_empty(block.get("signature")) + delta["signature"]
        case "input_json_delta":
            block.setdefault("type", "tool_use")
            block["json"] = text_or_empty(block.get("json")) + delta["partial_json"]
        case "citations_delta":
            block.setdefault("citations", [])
            block["citations"] = [*(block["citations"] or ()), delta.get("citation")]


def update_usage(told: dict[str, Any], one: Mapping[str, Any]) -> None:
    """Updates the usage so far: later values replace earlier ones, and missing values change nothing."""
    usage = one.get("usage") or value_at(one.get("message"), "usage")
    if isinstance(usage, dict):
        told.update({key: value for key, value in usage.items() if value is not None})


def usage_of(told: object) -> TokenUse:
    """Reads a usage. This dialect counts tokens read from the cache, and written to it, separately."""
    fresh, cached = token_count(value_at(told, "input_tokens")), token_count(value_at(told, "cache_read_input_tokens"))
    stored = token_count(value_at(told, "cache_creation_input_tokens"))
    use = TokenUse(
        prompt=None if fresh is None else fresh + (cached or 0) + (stored or 0),
        completion=token_count(value_at(told, "output_tokens")),
        cached=cached,
        reasoning=token_count(value_at(told, "output_tokens_details", "thinking_tokens")),
        stored=stored,
    )
    return known_usage(use)


def assistant_blocks(message: Message) -> Iterator[dict[str, Any]]:
    """Yields the content of an answer."""
    if thoughts := message.get("reasoning"):
        yield {"type": "thinking", "thinking": thoughts, "signature": message.get("reasoning_signature", "")}
    yield from parts_of(message["content"])
    for call in message.get("tool_calls", ()):
        yield {"type": "tool_use", "id": call["id"], "name": call["name"], "input": as_object(call["arguments"])}


def block_events(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the beginning of a block, and the deltas that follow."""
    if is_text(block):
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(text_of([block]))]
    if block.get("type") == "thinking":
        thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*thoughts, signature]
    if block.get("type") == "tool_use":
        text = to_json(block["input"])
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": one} for one in pieces(text)]
    return block, []


def usage_fields(usage: TokenUse) -> dict[str, Any]:
    """Returns the fields of a usage. Clients of this dialect need numbers: unknown counts are 0."""
    cached, stored = usage.cached or 0, usage.stored or 0
    fields: dict[str, Any] = {
        "input_tokens": max((usage.prompt or 0) - cached - stored, 0),
        "cache_creation_input_tokens": stored,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion or 0,
    }
    if usage.reasoning is not None:
        fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return fields
