"""The artifact `model_calls`: every call of an attempt in one file.

JSON lines, compressed with zstd; docs/reference/trajectories.md has the fields. The first line has its version, then
come messages and lists of tools, each once and before the first call that names it, and the calls.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import orjson
import zstandard
from pydantic import TypeAdapter, ValidationError

from app.ledger.model_calls import StoredCall
from app.model_service.dialects.base import exact_digest

FORMAT = "megaflow-model-calls"
VERSION = 1
_MOST_BYTES = 4 << 30
"""Limit of a file's unpacked size."""
_CALLS = TypeAdapter(StoredCall)
_BY_DIGEST = ("messages", "reply", "tools")
"""Fields that refer to their values by digest."""


def export(calls: Iterable[StoredCall]) -> bytes:
    """Returns the artifact of these calls, in their order."""
    buffer = io.BytesIO()
    with zstandard.ZstdCompressor(level=6).stream_writer(buffer, closefd=False) as packed:
        for line in _lines(calls):
            packed.write(orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS) + b"\n")
    return buffer.getvalue()


def _lines(calls: Iterable[StoredCall]) -> Iterator[dict[str, Any]]:
    yield {"format": FORMAT, "version": VERSION}
    written: dict[int, tuple[object, str]] = {}  # by identity, which calls share: a digest is computed once
    digests: set[str] = set()
    fresh: list[dict[str, Any]] = []

    def named(value: Any) -> str:
        digest = written[id(value)][1] if id(value) in written else exact_digest(value)
        written[id(value)] = (value, digest)
        if digest not in digests:
            digests.add(digest)
            fresh.append({"digest": digest, "said": value})
        return digest

    for call in calls:
        fresh.clear()
        line = _CALLS.dump_python(call, mode="json", exclude=set(_BY_DIGEST))
        line["messages"] = [named(message) for message in call.messages]
        line["reply"] = None if call.reply is None else named(call.reply)
        line["tools"] = named(list(call.tools)) if call.tools else None
        yield from fresh
        yield {"call": line}


def read(content: bytes) -> list[StoredCall]:
    """Reads the calls of an artifact. Raises: ValueError: not such a file, or of a later version."""
    lines = _unpacked(content)
    head = next(lines, {})
    if head.get("format") != FORMAT:
        raise ValueError(f"expected a file that begins with the format {FORMAT!r}; found {str(head)[:200]}")
    if head.get("version") != VERSION:
        raise ValueError(f"expected version {VERSION} of {FORMAT}; found {head.get('version')!r}; use a newer MegaFlow")
    values: dict[str, Any] = {}
    calls = []
    try:
        for line in lines:
            if "digest" in line:
                values[line["digest"]] = line["said"]
            elif "call" in line:
                calls.append(_call(line["call"], values))
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise ValueError(f"expected lines of {FORMAT}; found one with another shape: {error!r}") from error
    return calls


def _unpacked(content: bytes) -> Iterator[dict[str, Any]]:
    try:
        with zstandard.ZstdDecompressor().stream_reader(content) as reader:
            total = 0
            for line in io.BufferedReader(reader, 1 << 16):
                total += len(line)
                if total > _MOST_BYTES:
                    raise ValueError(f"expected at most {_MOST_BYTES} bytes unpacked")
                entry = orjson.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError(f"expected a JSON object in each line; found {line[:100]!r}")
                yield entry
    except zstandard.ZstdError as error:
        raise ValueError(f"expected zstd of JSON lines; found: {error}") from error


def _call(line: Mapping[str, Any], said: Mapping[str, Any]) -> StoredCall:
    call = _CALLS.validate_python({name: value for name, value in line.items() if name not in _BY_DIGEST})
    return replace(  # one message stays one object in all the calls that sent it
        call,
        messages=tuple(said[digest] for digest in line["messages"]),
        reply=None if line["reply"] is None else said[line["reply"]],
        tools=() if line["tools"] is None else tuple(said[line["tools"]]),
    )
