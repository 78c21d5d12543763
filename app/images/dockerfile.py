"""Finds the base images of a Dockerfile as the engine reads it, and pins them by id.

Only the instructions that name images are understood: FROM, COPY --from, and each ARG before the first FROM. What is
malformed is passed over: the engine will say so in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(.+?)\s*")
_DIRECTIVES = ("escape", "syntax", "check")
_WITH_DOCUMENTS = ("RUN", "COPY", "ADD")
_DOCUMENT = re.compile(r"<<(-?)[\"']?([A-Za-z_][A-Za-z0-9_]*)[\"']?")
_NO_IMAGE = "scratch"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, put together from its lines. `first`: its first line, from 0; `name`: in capitals."""

    first: int
    lines: int
    name: str
    rest: str

    @property
    def flags(self) -> list[str]:
        """The words with two dashes that it begins with."""
        words = self.rest.split()
        count = next((n for n, word in enumerate(words) if not word.startswith("--") or word == "--"), len(words))
        return words[:count]

    @property
    def arguments(self) -> list[str]:
        """The words after its flags."""
        return self.rest.split()[len(self.flags) :]


@dataclass(frozen=True, slots=True)
class BaseImage:
    """An image that is not made by the recipe itself, and where the recipe names it."""

    reference: str
    at: Instruction

    def on(self, image_id: str) -> str:
        """The instruction with the image's id in place of its name."""
        if self.at.name == "FROM":
            return " ".join(["FROM", *self.at.flags, image_id, *self.at.arguments[1:]])
        return f"{self.at.name} {self.at.rest.replace(f'--from={self.reference}', f'--from={image_id}', 1)}"


class Dockerfile:
    """A recipe, with the values that the build is given for its arguments."""

    def __init__(self, text: str, values: Mapping[str, str] | None = None) -> None:
        self._lines = text.removeprefix("\ufeff").split("\n")
        self._values = values or {}
        self._escape = _escape_of(self._lines)

    @cached_property
    def instructions(self) -> list[Instruction]:
        return list(self._instructions())

    @cached_property
    def bases(self) -> list[BaseImage]:
        """In the order of the recipe."""
        return list(self._bases())

    def takes(self, argument: str) -> bool:
        """Whether it declares an argument of this name anywhere."""
        declared = (word for one in self.instructions if one.name == "ARG" for word in one.rest.split())
        return any(word.partition("=")[0] == argument for word in declared)

    def on(self, ids: Mapping[str, str]) -> str:
        """The recipe with the images of these references named by id; every other line is where and what it was."""
        lines = list(self._lines)
        for base in self.bases:
            if (image_id := ids.get(base.reference)) is not None:
                first, count = base.at.first, base.at.lines
                lines[first : first + count] = [base.on(image_id), *[""] * (count - 1)]
        return "\n".join(lines)

    # --- Reading --------------------------------------------------------------------------------------------------

    def _bases(self) -> Iterator[BaseImage]:
        values: dict[str, str] = {}
        stages: set[str] = set()
        building = False
        for one in self.instructions:
            if one.name == "ARG" and not building:
                self._declare(one, values)
            elif one.name == "FROM" and one.arguments:
                building = True
                written, *named = one.arguments
                reference = expanded(written, values, self._escape)
                if reference and reference != _NO_IMAGE and reference.lower() not in stages:
                    yield BaseImage(reference, one)
                if len(named) == 2 and named[0].upper() == "AS":
                    stages.add(named[1].lower())
            elif one.name == "COPY":
                for flag in one.flags:
                    name = flag.removeprefix("--from=")
                    if name not in (flag, "", _NO_IMAGE) and not name.isdecimal() and name.lower() not in stages:
                        yield BaseImage(name, one)

    def _declare(self, one: Instruction, values: dict[str, str]) -> None:
        for word in one.rest.split():
            name, given, default = word.partition("=")
            if name in self._values:
                values[name] = self._values[name]
            elif given and (value := expanded(default, values, self._escape)) is not None:
                values[name] = value

    def _instructions(self) -> Iterator[Instruction]:
        ends = re.compile(rf"(^|[^{re.escape(self._escape)}]){re.escape(self._escape)}[ \t]*$")
        number = 0
        while number < len(self._lines):
            first, goes_on = number, True
            parts: list[str] = []
            while goes_on and number < len(self._lines):
                line = self._lines[number].rstrip("\r")
                number += 1
                passed_over = line.lstrip().startswith("#") or not line.strip()
                if passed_over and parts:
                    continue  # inside of an instruction it does not end it
                goes_on = not passed_over and ends.search(line) is not None
                parts.append("" if passed_over else ends.sub(r"\1", line))
            name, *rest = "".join(parts).split(None, 1) or [""]
            if name:
                yield Instruction(first, number - first, name.upper(), rest[0].strip() if rest else "")
            if name.upper() in _WITH_DOCUMENTS:
                number = self._after_documents(rest[0] if rest else "", number)

    def _after_documents(self, rest: str, number: int) -> int:
        """The line after the here-documents that an instruction opens: what is in them is no instruction."""
        for dash, end in _DOCUMENT.findall(rest):
            lines = (line.rstrip("\r") for line in self._lines[number:])
            found = next((at for at, line in enumerate(lines) if (line.lstrip("\t") if dash else line) == end), None)
            if found is None:  # for the engine to tell
                return number
            number += found + 1
        return number


def _escape_of(lines: list[str]) -> str:
    """The character that lets an instruction go on in the next line: a directive at the top may choose another."""
    for line in lines:
        found = _DIRECTIVE.fullmatch(line.strip())
        if found is None or found[1].lower() not in _DIRECTIVES:
            break
        if found[1].lower() == "escape":
            return found[2] if found[2] in ("\\", "`") else "\\"
    return "\\"


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
