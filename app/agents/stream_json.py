"""Reads files of frameworks: `stream-json` output (one JSON object per line, the last of type `result` if all is well),
a file with one object, the end of a log.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_DETAIL_CHARS = 600  # of an explanation; the whole text is in the log


def result(stdout: Path) -> dict[str, Any]:
    """Returns the last line of type `result`; empty when there is none: the framework was killed, or gave up before.

    Lines that are not JSON objects are skipped: a warning of a runtime, or a line that was cut.
    """
    last: dict[str, Any] = {}
    with stdout.open("rb") as lines:
        for line in lines:
            if b'"result"' in line and (row := _object(line)).get("type") == "result":
                last = row
    return last


def read_object(file: Path) -> dict[str, Any]:
    """Returns the one JSON object of a file; empty when there is no file or no object."""
    try:
        return _object(file.read_bytes())
    except OSError:
        return {}


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def short(text: object) -> str:
    """Returns the start of `text` on one line, for people to read."""
    return " ".join(str(text).split())[:_DETAIL_CHARS] if text else ""


def tail(file: Path) -> str:
    """Returns the end of a log, on one line; empty when there is no log."""
    try:
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - 4 * _DETAIL_CHARS))
            content = source.read(4 * _DETAIL_CHARS)
    except OSError:
        return ""
    return " ".join(content.decode("utf-8", "replace").split())[-_DETAIL_CHARS:]
