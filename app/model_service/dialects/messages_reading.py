"""Reading what Anthropic's messages say: requests, answers, streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from app.model_service.dialects.base import Message, Reply
from app.model_service.dialects.parts import as_text, assistant, call_of, content_of, tool_of
from app.model_service.dialects.reading import (
    counted,
    events_of,
    inside,
    number,
    quoted,
    said,
    scores_in,
    whole_numbers,
)
from app.models.model_calls import TokenUse

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


# --- Requests -------------------------------------------------------------------------------------------------------


def messages_of(one: Mapping[str, Any]) -> Iterator[Message]:
    """One message of theirs: results of tools, which they put into a user's message, are messages of their own."""
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
        if said_before := content_of(others):
            yield {"role": role, "content": said_before}
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
        kind = inside(block, "type")
        if kind == "thinking":
            thoughts.append(said(block.get("thinking")))
            signature = signature or said(block.get("signature"))
        elif kind == "tool_use":
            calls.append(call_of(block.get("id"), block.get("name"), as_text(block.get("input"))))
        else:
            rest.append(block)
    message = assistant(content_of(rest), reasoning="".join(thoughts), tool_calls=calls)
    if signature:
        message["reasoning_signature"] = signature  # theirs, over the thoughts: they want it back
    return message


def tool_from(tool: Mapping[str, Any]) -> dict[str, Any]:
    """An offered tool."""
    if isinstance(tool.get("input_schema"), dict):
        return tool_of(tool.get("name"), tool.get("description"), tool["input_schema"])
    return tool_of(tool.get("name") or tool.get("type"), "", None, given=dict(tool))


def fitting(thinking: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """A budget for thinking has to be smaller than the answer's bound."""
    budget = number(thinking.get("budget_tokens"))
    if budget is None or budget < max_tokens:
        return dict(thinking)
    if max_tokens <= _LEAST_THOUGHT:
        return {"type": "disabled"}
    return {**thinking, "budget_tokens": max(_LEAST_THOUGHT, max_tokens // 2)}


# --- Answers --------------------------------------------------------------------------------------------------------


def of_body(body: Mapping[str, Any]) -> Reply:
    """A whole answer. Raises: ValueError."""
    if body.get("type") == "error" or not isinstance(body.get("content"), list):
        raise ValueError(f"expected an answer with content; found {str(body.get('error') or body)[:200]}")
    reason = body.get("stop_reason")
    return Reply(
        message=_assistant(body["content"]),
        finish_reason=_FINISHES.get(said(reason), "stop" if reason else ""),
        usage=usage_of(body.get("usage")),
        model=said(body.get("model")),
        prompt_token_ids=whole_numbers(body.get("prompt_token_ids")),
        token_ids=whole_numbers(body.get("token_ids")),
        logprobs=scores_in(body.get("logprobs")),
    )


def of_stream(content: bytes) -> Reply:
    """A streamed answer, as far as it came. Raises: ValueError."""
    start: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    told: dict[str, Any] = {}
    reason, failed = None, ""
    for one in events_of(content):
        tell_usage(told, one)
        match one.get("type"):
            case "message_start":
                start = dict(one["message"])
            case "content_block_start":
                blocks[one["index"]] = dict(one["content_block"])
            case "content_block_delta":
                _add(blocks.setdefault(one["index"], {}), one["delta"])
            case "message_delta":
                reason = one["delta"].get("stop_reason") or reason
            case "error":
                failed = str(one.get("error"))[:200]
    if not start:
        raise ValueError(f"expected a stream that begins with message_start; found {failed or quoted(content)}")
    for block in blocks.values():
        if isinstance(text := block.pop("json", None), str):
            block["input"] = text
    body = {**start, "content": [blocks[at] for at in sorted(blocks)], "stop_reason": reason, "usage": told}
    found = of_body(body)
    return replace(found, complete=bool(reason) and not failed)


def _add(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    match delta.get("type"):
        case "text_delta":
            block.setdefault("type", "text")
            block["text"] = said(block.get("text")) + delta["text"]
        case "thinking_delta":
            block.setdefault("type", "thinking")
            block["thinking"] = said(block.get("thinking")) + delta["thinking"]
        case "signature_delta":
            block["signature"] = said(block.get("signature")) + delta["signature"]
        case "input_json_delta":
            block.setdefault("type", "tool_use")
            block["json"] = said(block.get("json")) + delta["partial_json"]
        case "citations_delta":
            block.setdefault("citations", [])
            block["citations"] = [*(block["citations"] or ()), delta.get("citation")]


def tell_usage(told: dict[str, Any], one: Mapping[str, Any]) -> None:
    """The usage so far: what comes later counts, but for what is not said again."""
    usage = one.get("usage") or inside(one.get("message"), "usage")
    if isinstance(usage, dict):
        told.update({key: value for key, value in usage.items() if value is not None})


def usage_of(told: object) -> TokenUse:
    """What came from the cache, and went there, is counted apart in this dialect."""
    fresh, cached = number(inside(told, "input_tokens")), number(inside(told, "cache_read_input_tokens"))
    stored = number(inside(told, "cache_creation_input_tokens"))
    use = TokenUse(
        prompt=None if fresh is None else fresh + (cached or 0) + (stored or 0),
        completion=number(inside(told, "output_tokens")),
        cached=cached,
        reasoning=number(inside(told, "output_tokens_details", "thinking_tokens")),
        stored=stored,
    )
    return counted(use)
