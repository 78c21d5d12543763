"""Defines types of values in compose files: texts, flags, sizes, times, as authors mean them. Refuses others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from app.compose_file.refusals import refused

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_MOST_BYTES = 1 << 60
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(h|ms|us|µs|ns|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_PATH = r"(/usr)?(/s?bin/)?"
_WAIT = r"(exec\s+)?(sleep\s+\S+|tail\s+(-f|-F)\s+/dev/null|cat|:|true)"
_LOOP = r"while\s+(true|:|\[ 1 \])\s*;\s*do\s+(sleep\s+\S+|:|true)\s*;?\s*done"
_ALONE = re.compile(rf"{_PATH}((ba|da|a)?sh|{_WAIT}|python3?)")
_SHELL = re.compile(rf"{_PATH}(ba|da|a)?sh")
_SCRIPT = re.compile(rf"\s*({_WAIT}|{_LOOP})\s*;?\s*")


def idle(argv: Sequence[str]) -> bool:
    """Whether a command only keeps a container alive. An environment's container stays alive without it."""
    if len(argv) == 3 and _SHELL.fullmatch(argv[0]) and argv[1] in ("-c", "-lc"):
        return _SCRIPT.fullmatch(argv[2]) is not None
    return _ALONE.fullmatch(" ".join(argv)) is not None


def plain(value: Any) -> str:
    """Returns a scalar as text, as YAML authors mean it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def text(value: Any) -> str | None:
    """Returns a text or a number as text; None when it is empty."""
    if isinstance(value, dict | list):
        raise refused("a text", value)
    return None if value is None else plain(value) or None


def texts(value: Any) -> tuple[str, ...]:
    """Returns one text, or a list of texts, as a tuple."""
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple(item for one in listed if (item := text(one)) is not None)


def pairs(value: Any) -> dict[str, str | None]:
    """Reads `NAME=value` items of a list, or a map; None where no value is given."""
    if isinstance(value, dict):
        return {key: None if one is None else text(one) or "" for key, one in value.items()}
    if not isinstance(value, list):
        raise refused("a list", value)
    split = [(text(one) or "").partition("=") for one in value]
    return {name: given if equals else None for name, equals, given in split}


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple("" if one is None else plain(one) for one in value)
    if isinstance(value, dict):
        raise refused("a text or a list of words", value)
    try:
        return tuple(shlex.split(plain(value)))
    except ValueError as error:
        raise refused(f"words that a shell can split ({error})", value) from error


def size(value: Any) -> int | None:
    """Reads a size in bytes: `512m`, `1gb`, or a number of bytes."""
    if value in (None, ""):
        return None
    match = _SIZE.fullmatch(plain(value).strip()) if not isinstance(value, dict | list) else None
    if match is None:
        raise refused("a size such as 512m or 2g", value)
    size_bytes = float(match[1]) * (1 << _UNITS[match[2].lower()])
    if size_bytes > _MOST_BYTES:
        raise refused("a size below an exbibyte", value)
    return int(size_bytes)


def _seconds(value: Any) -> float:
    """Reads a time in seconds: `1m30s`, `500ms`; 0 when it is empty."""
    given = plain(value).strip() if not isinstance(value, dict | list) else ""
    parts = _TIME.findall(given)
    if given not in ("0", "") and (not parts or "".join(number + unit for number, unit in parts) != given):
        raise refused("a time such as 5s or 1m30s", value)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _number(value: Any) -> float | None:
    if value in (None, ""):
        return None
    try:
        number = float(plain(value))
    except ValueError:
        number = 0.0
    if isinstance(value, bool) or not 0 < number < 1e12:
        raise refused("a number above zero", value)
    return number


def count(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def flag(value: Any) -> bool:
    """Reads true or false, also in quotes."""
    given = plain(value).lower() if not isinstance(value, dict | list) else "?"
    if given not in ("", "none", "false", "no", "off", "0", "true", "yes", "on", "1"):
        raise refused("true or false", value)
    return given in ("true", "yes", "on", "1")


Text = Annotated[str | None, BeforeValidator(text)]
Texts = Annotated[tuple[str, ...], BeforeValidator(texts)]
Words = Annotated[tuple[str, ...] | None, BeforeValidator(_words)]
"""A command line: a list is kept, a text is split like in a shell."""
Flag = Annotated[bool, BeforeValidator(flag)]
Size = Annotated[int | None, BeforeValidator(size)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Number = Annotated[float | None, BeforeValidator(_number)]
Count = Annotated[int | None, BeforeValidator(count)]
