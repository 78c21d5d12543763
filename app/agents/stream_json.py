"""Reads what frameworks write: `stream-json` output (one JSON object a line, in the end one of type `result` if all is
well), a file with one object, the end of a log.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_DETAIL_CHARS = 600  # of an explanation; the whole text is in the log


def result(stdout: Path) -> dict[str, Any]:
    """The last line of type `result`; empty when there is none: the framework was killed, or gave up without one.

    Lines that are no JSON objects are passed over: a warning of a runtime, or a line that was cut.
    """
    found: dict[str, Any] = {}
    with stdout.open("rb") as lines:
        for line in lines:
            if b'"result"' in line and (told := _object(line)).get("type") == "result":
                found = told
    return found


def read_object(file: Path) -> dict[str, Any]:
    """A file's one JSON object; empty when there is no file, or it is none."""
    try:
        return _object(file.read_bytes())
    except OSError:
        return {}


def _object(text: bytes) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def short(text: object) -> str:
    """What a person may want to read of `text`, on one line."""
    return " ".join(str(text).split())[:_DETAIL_CHARS] if text else ""


def tail(file: Path) -> str:
    """The end of a log, on one line; empty when there is no log."""
    try:
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - 4 * _DETAIL_CHARS))
            content = source.read(4 * _DETAIL_CHARS)
    except OSError:
        return ""
    return " ".join(content.decode("utf-8", "replace").split())[-_DETAIL_CHARS:]


def tokens(told: dict[str, Any], **names: str) -> dict[str, float]:
    """The counters `names` (ours: the framework's) of a result's `usage`; what it does not say is left out."""
    reported = told.get("usage")
    reported = reported if isinstance(reported, dict) else {}
    return {
        ours: float(count)
        for ours, theirs in names.items()
        if isinstance(count := reported.get(theirs), int | float) and not isinstance(count, bool)
    }
