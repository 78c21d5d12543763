"""Pieces of messages that the dialects share: contents, arguments of tool calls, how answers are cut for a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from app.model_service.dialects.base import Message
from app.model_service.dialects.reading import parsed

_TEXTS = frozenset({"text", "input_text", "output_text"})
_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Set by clients for an engine's cache; they move from call to call and say nothing."""
_WORD = re.compile(r"\s*\S+|\s+")
_PLAIN = "arguments"
"""Where arguments that are no JSON object stand when they have to be one."""


def content_of(value: object) -> str | list[dict[str, Any]]:
    """A message's content in the normal form: plain text where it is nothing else, without empty parts."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else "" if value is None else dumped(value)
    parts = [part for one in value if (part := _part(one)) is not None]
    if not parts:
        return ""
    if len(parts) == 1 and is_text(parts[0]):
        return str(parts[0]["text"])
    return parts


def _part(one: object) -> dict[str, Any] | None:
    if not isinstance(one, dict):
        one = {"type": "text", "text": one if isinstance(one, str) else dumped(one)}
    if one.get("type") in _TEXTS and isinstance(one.get("text"), str):
        return {"type": "text", "text": one["text"]} if one["text"] else None
    return {key: value for key, value in one.items() if key not in _MARKS}


def is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def parts_of(content: object) -> list[dict[str, Any]]:
    """A content as parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content) if isinstance(content, list) else []


def text_of(content: object) -> str:
    """The words of a content; parts that are not text are left out."""
    return "".join(part["text"] for part in parts_of(content) if is_text(part))


def assistant(
    content: str | list[dict[str, Any]], *, reasoning: str = "", tool_calls: Sequence[Mapping[str, str]] = ()
) -> Message:
    """An assistant's message in the normal form."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if tool_calls:
        message["tool_calls"] = [dict(call) for call in tool_calls]
    return message


def call_of(call_id: object, name: object, arguments: object) -> dict[str, str]:
    """A tool call in the normal form; arguments as text, or as the object that they say."""
    text = arguments if isinstance(arguments, str) else "" if arguments is None else dumped(arguments)
    return {"id": str(call_id or ""), "name": str(name or ""), "arguments": text}


def tool_of(name: object, description: object, parameters: object, **more: Any) -> dict[str, Any]:
    """An offered tool in the normal form."""
    return {
        "name": str(name or ""),
        "description": description if isinstance(description, str) else "",
        "parameters": parameters if isinstance(parameters, dict) else {},
        **more,
    }


# --- Arguments ------------------------------------------------------------------------------------------------------


def dumped(value: object) -> str:
    """JSON in one line, keys in the order in which they came."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def as_object(arguments: str) -> dict[str, Any]:
    """Arguments for a dialect where they are an object; `as_text` is the way back."""
    try:
        found = parsed(arguments)
    except ValueError:
        return {_PLAIN: arguments} if arguments else {}
    return found if isinstance(found, dict) else {_PLAIN: arguments}


def as_text(arguments: object) -> str:
    """Arguments that were an object, as text."""
    if isinstance(arguments, dict) and set(arguments) == {_PLAIN} and isinstance(arguments[_PLAIN], str):
        return str(arguments[_PLAIN])
    return arguments if isinstance(arguments, str) else dumped({} if arguments is None else arguments)


# --- Streams --------------------------------------------------------------------------------------------------------


def pieces(text: str) -> list[str]:
    """A text as an engine would send it: about a word at a time."""
    return _WORD.findall(text)


def dealt(values: Sequence[Any] | None, count: int) -> Iterator[list[Any]]:
    """`values` over `count` pieces, in order and about equally; empty lists where there are none."""
    told = values or ()
    for at in range(count):
        yield list(told[at * len(told) // count : (at + 1) * len(told) // count])


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
