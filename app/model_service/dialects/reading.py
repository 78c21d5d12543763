"""Reads untrusted JSON and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from app.errors import SpecInvalid
from app.models.model_calls import TokenUse

_LAST_EVENTS = 8
"""Number of events at the end of a stream that are read for the tokens: engines report them in one of the last."""
_QUOTED = 200


def parse_json(content: bytes | str) -> Any:
    """Parses JSON, also with NaN, infinities and half surrogate pairs, as some engines write. Raises: ValueError."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
        try:
            return _encodable(json.loads(text))
        except RecursionError:
            raise ValueError("JSON that is nested too deep") from None


def _encodable(value: Any) -> Any:
    """Removes what PostgreSQL, UTF-8 or strict JSON cannot represent."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case float() if value != value or value in (float("inf"), float("-inf")):
            return None
        case int() if not -(2**63) <= value < 2**64:
            return float(value) if abs(value) < 2**1000 else None
        case list():
            return [_encodable(one) for one in value]
        case dict():
            return {_encodable(key): _encodable(one) for key, one in value.items()}
        case _:
            return value


def known_usage(use: TokenUse) -> TokenUse:
    """Returns the usage, or an empty one if all counts are 0: each call has tokens, so the engine did not count."""
    return use if use.prompt or use.completion else TokenUse()


def usage_at(told: object, **paths: str) -> TokenUse:
    """Reads the tokens that an engine reports. paths: place of each field of `TokenUse`, as `name` or `outer.name`."""
    return known_usage(TokenUse(**{name: token_count(value_at(told, *at.split("."))) for name, at in paths.items()}))


def body_of(content: bytes) -> dict[str, Any]:
    """Parses one JSON object. Raises: ValueError: something else."""
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object; found {type(value).__name__}: {excerpt(content)}")
    return value


def events_of(content: bytes) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a stream's events, in order. Incomplete events and other values are left out."""
    data = b""
    for line in content.splitlines():
        if not line.startswith(b"data:"):
            data = data if line else b""
            continue
        data = (data + b"\n" + line[5:]).strip()  # nearly all engines write an event's JSON in one line
        if not data.startswith(b"{"):
            data = b""
        elif (event := _object(data)) is not None:
            yield event
            data = b""


def events_with_key(content: bytes, word: bytes) -> list[dict[str, Any]]:
    """Returns events with the key `word`, without parsing the others: the first of the stream, and some of the last.

    For keys near the start or the end of a stream. Engines write an event's JSON in one line.
    """
    key = b'"' + word + b'"'
    lines = [line for line in content.splitlines() if line.startswith(b"data:") and key in line]
    if len(lines) > _LAST_EVENTS:
        lines = [lines[0], *lines[-_LAST_EVENTS:]]
    return [event for line in lines if (event := _object(line[5:].strip())) is not None]


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def token_count(value: object) -> int | None:
    """Returns a count of tokens. None: the value is no count."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if 0 <= value < 2**31 else None


def value_at(value: object, *path: str) -> Any:
    """Returns the value at `path` of nested objects. None: there is none."""
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def list_or_empty(value: object) -> list[Any]:
    """Returns a list; empty if the value is none."""
    return value if isinstance(value, list) else []


def text_or_empty(value: object) -> str:
    """Returns a text; empty if the value is none."""
    return value if isinstance(value, str) else ""


def whole_numbers(value: object) -> tuple[int, ...] | None:
    """Returns token ids. None: the value is no list of integers."""
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        return None
    return tuple(value)


def scores_in(value: object) -> tuple[float, ...] | None:
    """Returns log-probabilities. None: one of them is no number."""
    if not isinstance(value, list) or not all(type(one) in (int, float) for one in value):
        return None
    return tuple(float(one) for one in value)


def excerpt(content: bytes) -> str:
    """Returns the beginning of untrusted bytes, for an error message."""
    text = content[: _QUOTED * 4].decode("utf-8", "replace")
    return repr(text[:_QUOTED] + ("…" if len(text) > _QUOTED else ""))


def unexpected(of: str, expected: str, found: object) -> SpecInvalid:
    """Returns the error for a request with an unexpected value."""
    return SpecInvalid(f"{of}: expected {expected}; found {found!r:.200}")


def model_of(body: Mapping[str, Any], of: str) -> str:
    """Raises: SpecInvalid."""
    if not isinstance(name := body.get("model"), str) or not name:
        raise unexpected(of, "`model`, the name of a model", name)
    return name


def objects_of(body: Mapping[str, Any], key: str, of: str) -> list[dict[str, Any]]:
    """Reads a list of objects that is not empty. Raises: SpecInvalid."""
    value = body.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise unexpected(of, f"`{key}`, a list of objects that is not empty", value)
    return value
