"""Reads recordings of terminals as workers write them, and checks whether a player can show what their tasks wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

from app.errors import SpecInvalid
from app.texts import clean

MOST_BYTES = 8 << 20
"""Most bytes of a recording that is read: twice what a worker and a grader may make."""
_MOST_TEXT = 1 << 20
"""Most characters of a recording that are shown as text."""
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
    """Reads the first line. Raises: SpecInvalid: it is no header."""
    try:
        header = orjson.loads(content.partition(b"\n")[0])
        return Recording(float(header["timestamp"]), tuple(RunCommand(*row) for row in header["commands"]))
    except (ValueError, KeyError, TypeError):
        raise SpecInvalid("expected a recording of a terminal (asciicast, version 2), found something else") from None


def read_recording(content: bytes) -> Recording:
    """Reads all of it, with the text that it shows. Raises: SpecInvalid: it is not a recording."""
    header = read_header(content)
    try:
        written = [str(text) for _, kind, text in map(orjson.loads, content.splitlines()[1:]) if kind == "o"]
    except (ValueError, TypeError):
        raise SpecInvalid("expected the events of a recording after its first line, found something else") from None
    repeated = sum(int(match[1][:9]) for text in written for match in _REPEATED.finditer(text))
    slow = repeated > _MOST_REPEATED or any(map(_LARGE_NUMBERS.search, written))
    why = "what is written there would keep a player busy for long" if slow else ""
    text = clean("".join(written).replace("\r\n", "\n"))
    return Recording(header.began, header.commands, text[:_MOST_TEXT], len(text) > _MOST_TEXT, why)
