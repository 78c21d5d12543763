"""Writing Anthropic's messages: messages, answers, their pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.dialects.parts import as_object, dumped, is_text, parts_of, pieces, text_of
from app.models.model_calls import TokenUse


def turns(request: Request) -> Iterator[dict[str, Any]]:
    """Results of tools that follow each other go into one message of the user's."""
    results: list[dict[str, Any]] = []
    for one in request.messages:
        if one["role"] == "tool":
            results.append(_written_result(one))
            continue
        if results:
            yield {"role": "user", "content": results}
            results = []
        if one["role"] == "assistant":
            yield {"role": "assistant", "content": list(blocks(one))}
        elif one["role"] != "system":
            yield {"role": one["role"], "content": one["content"]}
    if results:
        yield {"role": "user", "content": results}


def _written_result(message: Message) -> dict[str, Any]:
    failed = {"is_error": True} if message.get("is_error") else {}
    asked_by = message.get("tool_call_id", "")
    return {"type": "tool_result", "tool_use_id": asked_by, "content": message["content"], **failed}


def written_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """An offered tool."""
    if isinstance(given := tool.get("given"), dict):
        return given
    return {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}


def blocks(message: Message) -> Iterator[dict[str, Any]]:
    """The content of an answer."""
    if thoughts := message.get("reasoning"):
        yield {"type": "thinking", "thinking": thoughts, "signature": message.get("reasoning_signature", "")}
    yield from parts_of(message["content"])
    for call in message.get("tool_calls", ()):
        yield {"type": "tool_use", "id": call["id"], "name": call["name"], "input": as_object(call["arguments"])}


def streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How a block begins, and what is added to it."""
    if is_text(block):
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(text_of([block]))]
    if block.get("type") == "thinking":
        thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*thoughts, signature]
    if block.get("type") == "tool_use":
        text = dumped(block["input"])
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": one} for one in pieces(text)]
    return block, []


def usage_told(usage: TokenUse) -> dict[str, Any]:
    """Clients of this dialect count on numbers: what is not known is 0."""
    cached, stored = usage.cached or 0, usage.stored or 0
    told: dict[str, Any] = {
        "input_tokens": max((usage.prompt or 0) - cached - stored, 0),
        "cache_creation_input_tokens": stored,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion or 0,
    }
    if usage.reasoning is not None:
        told["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return told


def token_fields(reply: Reply) -> dict[str, Any]:
    """What is not of this dialect: token ids, for those who asked."""
    found = {"prompt_token_ids": reply.prompt_token_ids, "token_ids": reply.token_ids, "logprobs": reply.logprobs}
    return {key: list(value) for key, value in found.items() if value is not None}
