"""A word of a recipe with its variables and quotes resolved, as the engine does it for FROM."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Malformed(ValueError):
    """What no engine would take."""


def expanded(word: str, values: Mapping[str, str], escape: str = "\\") -> str | None:
    """`$NAME`, `${NAME}`, `${NAME:-otherwise}`, `${NAME:+instead}`, quotes; a variable without a value is empty.

    None: the engine would refuse the word.
    """
    try:
        found, rest = _until("", word, values, escape)
    except _Malformed:
        return None
    return found if not rest else None


def _until(end: str, text: str, values: Mapping[str, str], escape: str) -> tuple[str, str]:
    """Resolve up to the character `end`; what was found, and what stands after it. Raises: _Malformed."""
    found: list[str] = []
    while text:
        first, text = text[0], text[1:]
        if first == end:
            return "".join(found), text
        if first == "'" and end != '"':
            literal, closed, text = text.partition("'")
            if not closed:
                raise _Malformed(literal)
            found.append(literal)
        elif first == '"' and end != '"':
            inner, text = _until('"', text, values, escape)
            found.append(inner)
        elif first == escape:
            found.append(text[:1])
            text = text[1:]
        elif first == "$":
            value, text = _variable(text, values, escape)
            found.append(value)
        else:
            found.append(first)
    if end:
        raise _Malformed(end)
    return "".join(found), ""


def _variable(text: str, values: Mapping[str, str], escape: str) -> tuple[str, str]:
    """The value of the variable that `text` begins with, and what follows. Raises: _Malformed."""
    if not text.startswith("{"):
        bare = _NAME.match(text)
        return (values.get(bare[0], ""), text[bare.end() :]) if bare else ("$", text)
    named = _NAME.match(text, 1)
    if named is None:
        raise _Malformed(text)
    value, rest = values.get(named[0]), text[named.end() :]
    if rest.startswith("}"):
        return value or "", rest[1:]
    if rest.startswith(":"):  # takes an empty value for none
        value, rest = value or None, rest[1:]
    operator, (other, rest) = rest[:1], _until("}", rest[1:], values, escape)
    match operator:
        case "-":
            return (other if value is None else value), rest
        case "+":
            return ("" if value is None else other), rest
    raise _Malformed(operator)
