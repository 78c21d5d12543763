"""Writing OpenAI's responses: messages, answers, their pieces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.dialects.parts import is_text, parts_of, pieces
from app.models.model_calls import TokenUse


def head(reply: Reply, answer_id: str, request: Request) -> dict[str, Any]:
    """What clients expect beside the answer itself; a repetition of what was asked."""
    asked = request.parameters
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": asked.get("metadata") or {},
        "model": reply.model or request.model,
        "output": [],
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "temperature": asked.get("temperature", 1.0),
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": [written_tool(tool) for tool in request.tools],
        "top_p": asked.get("top_p", 1.0),
        "max_output_tokens": request.max_tokens,
        "previous_response_id": asked.get("previous_response_id"),
        "usage": None,
    }


def status_of(finish_reason: str) -> dict[str, Any]:
    """How an answer ended."""
    reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
    if finish_reason in reasons:
        return {"status": "incomplete", "incomplete_details": {"reason": reasons[finish_reason]}}
    return {"status": "completed", "incomplete_details": None}


def output_of(reply: Reply, answer_id: str) -> Iterator[dict[str, Any]]:
    """The items of an answer, with ids."""
    stem = answer_id.removeprefix("resp_")
    for at, item in enumerate(written(reply.message)):
        kind = item.get("type")
        prefix = {"reasoning": "rs", "function_call": "fc"}.get(str(kind), "msg")
        found = {"id": f"{prefix}_{stem}_{at}", **item}
        if kind == "message":
            found["content"] = [_annotated(part) for part in item["content"]]
        yield found if kind == "reasoning" else {"status": "completed", **found}


def _annotated(part: dict[str, Any]) -> dict[str, Any]:
    return {"annotations": [], "logprobs": [], **part} if part.get("type") == "output_text" else part


def written(message: Message) -> Iterator[dict[str, Any]]:
    """A message of the normal form as items."""
    role = message["role"]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": _result(message)}
        return
    if role != "assistant":
        parts = [_named(part, "input_text") for part in parts_of(message["content"])]
        yield {"type": "message", "role": role, "content": parts}
        return
    if thoughts := message.get("reasoning"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thoughts}]}
    if parts := [_named(part, "output_text") for part in parts_of(message["content"])]:
        yield {"type": "message", "role": "assistant", "content": parts}
    for call in message.get("tool_calls", ()):
        yield {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["name"],
            "arguments": call["arguments"],
        }


def _result(message: Message) -> str | list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, str) else [_named(part, "input_text") for part in content]


def _named(part: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"type": kind, "text": part["text"]} if is_text(part) else part


def written_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """An offered tool."""
    if isinstance(given := tool.get("given"), dict):
        return given
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["parameters"],
        "strict": bool(tool.get("strict")),
    }


def item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one item: name and data."""
    kind, item_id = item["type"], item["id"]
    opened = {**item, "status": "in_progress"} if "status" in item else dict(item)
    opened["arguments" if kind == "function_call" else "content"] = "" if kind == "function_call" else []
    yield "response.output_item.added", {"item": opened}
    if kind == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {"item_id": item_id, "delta": piece}
        done = {"item_id": item_id, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    else:
        stem = "response.reasoning_text" if kind == "reasoning" else "response.output_text"
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        for at, part in enumerate(item["content"]):
            place = {"item_id": item_id, "content_index": at}
            if not isinstance(part.get("text"), str):
                continue
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield f"{stem}.delta", {**place, "delta": piece, **more}
            yield f"{stem}.done", {**place, "text": part["text"], **more}
            yield "response.content_part.done", {**place, "part": part}
    yield "response.output_item.done", {"item": item}


def usage_told(usage: TokenUse) -> dict[str, Any] | None:
    """None: not known."""
    if usage.prompt is None or usage.completion is None:
        return None
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def token_fields(reply: Reply) -> dict[str, Any]:
    """What is not of this dialect: token ids, for those who asked."""
    found = {"prompt_token_ids": reply.prompt_token_ids, "token_ids": reply.token_ids, "logprobs": reply.logprobs}
    return {key: list(value) for key, value in found.items() if value is not None}
