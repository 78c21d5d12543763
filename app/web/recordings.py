"""Reads recordings of terminals, and checks whether a player can show one: their bytes are not trusted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from app.errors import SpecInvalid
from app.texts import clean

MOST_BYTES = 8 << 20
"""Most bytes of a recording that is read: twice what a worker and a grader may make."""
_MOST_TEXT = 1 << 20
"""Most characters of a recording that are shown as text."""
_MOST_CELLS = {"width": 200, "height": 100}
_MOST_COMMANDS = 5000
_LATEST = 1e10
"""Largest time in seconds, since a recording's begin or since 1970."""
_MOST_EVENTS = 200_000
_LONGEST_EVENT = 512 << 10
_LARGE_NUMBERS = re.compile(r"(?:\x1b\[|\x9b)(?!\?)[^@-~]{0,64}?\d{4}")
_REPEATED = re.compile(r"(?:\x1b\[|\x9b)(\d+)[ILMPSTXZb@]")
"""Escape sequences that repeat something a number of times."""
_MOST_REPEATED = 500_000
"""Most repetitions in one recording. A million lines in one event fill a player's memory, after minutes (measured)."""


@dataclass(frozen=True, slots=True)
class RunCommand:
    """A command: seconds since the recording's begin, its stage, how it ended (empty: well), its first line."""

    begun_s: float
    ended_s: float
    stage: str
    how: str
    label: str


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording. began: seconds since 1970. unplayable: why a player cannot show it; empty: a player can."""

    began: float
    commands: tuple[RunCommand, ...]
    text: str = ""
    is_cut: bool = False
    unplayable: str = ""


def read_header(content: bytes) -> Recording:
    """Reads the first line. Raises: SpecInvalid: it is no header, or the recording is too long."""
    return _header(_checked(content).partition(b"\n")[0])


def read_recording(content: bytes) -> Recording:
    """Reads all of it, with the text that it shows. Raises: SpecInvalid: no readable first line, or too long."""
    first, _, rest = _checked(content).partition(b"\n")
    header = _header(first)
    parts, size, why, last, repeated = list[str](), 0, header.unplayable, 0.0, 0
    for number, line in enumerate(rest.splitlines()):
        event = _event(line)
        if event is None or event[0] < last or number >= _MOST_EVENTS:
            why = (
                why or f"expected an event of a recording in line {number + 2}, found another, or one that is too late"
            )
            break
        last = event[0]
        if event[1] == "o":
            repeated += sum(int(match[1][:9]) for match in _REPEATED.finditer(event[2]))
            if len(event[2]) > _LONGEST_EVENT or repeated > _MOST_REPEATED or _LARGE_NUMBERS.search(event[2]):
                why = why or f"what is written by line {number + 2} would keep a player busy for long"
            if size <= _MOST_TEXT:
                parts.append(event[2])
                size += len(event[2])
    text = clean("".join(parts).replace("\r\n", "\n"))
    return Recording(header.began, header.commands, text[:_MOST_TEXT], size > _MOST_TEXT, why)


def _checked(content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        raise SpecInvalid(f"the recording has {len(content):,} bytes, too many for a page; fetch the file")
    return content


def _header(line: bytes) -> Recording:
    header = _json(line)
    if not isinstance(header, dict) or header.get("version") != 2 or not _is_time(header.get("timestamp")):
        raise SpecInvalid("expected a recording of a terminal (asciicast, version 2), found something else")
    why = ""
    for name, most in _MOST_CELLS.items():
        if type(header.get(name)) is not int or not 0 < header[name] <= most:
            why = f"expected a {name} of 1 to {most}, found {str(header.get(name))[:20]!r}"
    if set(header) - {"version", "width", "height", "timestamp", "idle_time_limit", "commands"} or not _is_time(
        header.get("idle_time_limit", 1)
    ):
        why = "its first line has unknown fields"
    rows = header.get("commands")
    commands = tuple(_commands(rows[:_MOST_COMMANDS] if isinstance(rows, list) else []))
    return Recording(float(header["timestamp"]), commands, unplayable=why)


def _commands(rows: list[Any]) -> Iterator[RunCommand]:
    for row in rows:
        if isinstance(row, list) and len(row) == 5 and all(isinstance(one, str) for one in row[2:]):
            begun, ended, stage, how, label = row
            if _is_time(begun) and _is_time(ended) and begun <= ended:
                yield RunCommand(float(begun), float(ended), stage[:80], how[:80], label[:200])


def _event(line: bytes) -> tuple[float, str, str] | None:
    event = _json(line)
    if isinstance(event, list) and len(event) == 3 and _is_time(event[0]):
        at, kind, text = event
        if kind in ("o", "m") and isinstance(text, str):
            return float(at), kind, text
    return None


def _json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError:  # also what is nested too deeply
        return None


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LATEST
