"""Writes requests of the normal form in each dialect, as clients send them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.model_service.dialects import Message, Request, codec_for
from app.model_service.dialects.base import is_text, parts_of
from app.model_service.dialects.chat import assistant_message
from app.model_service.dialects.messages import assistant_blocks
from app.model_service.dialects.responses import assistant_items, tool_entry
from app.models.model_calls import Dialect


def body_of(dialect: Dialect, request: Request) -> dict[str, Any]:
    """The body of a call."""
    written = {Dialect.CHAT: _chat, Dialect.RESPONSES: _responses, Dialect.MESSAGES: _messages}[dialect](request)
    body = {"model": request.model, **written, **request.parameters} | ({"stream": True} if request.stream else {})
    return body if request.max_tokens is None else codec_for(dialect).with_max_tokens(body, request.max_tokens)


def _chat(request: Request) -> dict[str, Any]:
    messages = [
        assistant_message(one)
        if one["role"] == "assistant"
        else {key: one[key] for key in ("role", "content", "tool_call_id") if key in one}
        for one in request.messages
    ]
    tools = [{"type": "function", "function": dict(tool)} for tool in request.tools]
    return {"messages": messages} | ({"tools": tools} if tools else {})


def _responses(request: Request) -> dict[str, Any]:
    items = [item for message in request.messages for item in _items(message)]
    return {"input": items} | ({"tools": [tool_entry(tool) for tool in request.tools]} if request.tools else {})


def _items(message: Message) -> Iterator[dict[str, Any]]:
    if message["role"] == "assistant":
        yield from assistant_items(message)
        return
    content = [
        {"type": "input_text", "text": one["text"]} if is_text(one) else one for one in parts_of(message["content"])
    ]
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": content}
    else:
        yield {"type": "message", "role": message["role"], "content": content}


def _messages(request: Request) -> dict[str, Any]:
    system = [part for one in request.messages if one["role"] == "system" for part in parts_of(one["content"])]
    body: dict[str, Any] = {"max_tokens": request.max_tokens or 4096, "messages": list(_turns(request))} | (
        {"system": system} if system else {}
    )
    if request.tools:
        body["tools"] = [
            tool.get("given")
            or {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in request.tools
        ]
    return body


def _turns(request: Request) -> Iterator[dict[str, Any]]:
    """Neighbouring results of tools go into one message of the user's."""
    results: list[dict[str, Any]] = []
    for one in request.messages:
        if one["role"] == "tool":
            failed = {"is_error": True} if one.get("is_error") else {}
            result = {"type": "tool_result", "tool_use_id": one.get("tool_call_id", ""), "content": one["content"]}
            results.append(result | failed)
            continue
        if results:
            yield {"role": "user", "content": results}
            results = []
        if one["role"] == "assistant":
            yield {"role": "assistant", "content": list(assistant_blocks(one))}
        elif one["role"] != "system":
            yield {"role": one["role"], "content": one["content"]}
    if results:
        yield {"role": "user", "content": results}
