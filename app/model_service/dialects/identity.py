"""Compares messages by what they say, not by how a client wrote them.

Clients move marks of their caches about, make up ids anew, write a text plain or as a part, and print arguments with
other blanks. None of that makes another message. For joining calls to a conversation; a message that is kept has the
digest of its exact form (`exact`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from app.model_service.dialects.base import Message, is_text, parts_of
from app.model_service.dialects.reading import parse_json

_DIGEST_BYTES = 16
_IDS = frozenset({"id", "tool_call_id", "call_id", "tool_use_id", "item_id", "cache_control", "signature", "status"})


def exact_digest(value: object) -> str:
    """Digest of a value in its exact form; the order of keys is no part of it."""
    content = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.sha256(content).hexdigest()[: 2 * _DIGEST_BYTES]


def meaning_digest(message: Message) -> str:
    """Digest that two messages share when they say the same; thoughts, which few send back, do not count."""
    return exact_digest(_meaning(message))


def _meaning(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message["role"], "content": _content(message.get("content"))}
    if calls := message.get("tool_calls"):
        found["calls"] = [[call.get("name"), _arguments(call.get("arguments"))] for call in calls]
    return found


def _content(content: object) -> list[Any]:
    """Neighbouring texts are one; blanks around it and empty parts do not count."""
    found: list[Any] = []
    text = ""
    for part in parts_of(content):
        if is_text(part):
            text += part["text"]
            continue
        found += [text.strip()] if text.strip() else []
        text = ""
        found.append(_without_ids(part))
    return [*found, text.strip()] if text.strip() else found


def _arguments(text: object) -> Any:
    try:
        return parse_json(text) if isinstance(text, str) and text else {}
    except ValueError:
        return text


def _without_ids(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_ids(one) for key, one in value.items() if key not in _IDS}
    return [_without_ids(one) for one in value] if isinstance(value, list) else value
