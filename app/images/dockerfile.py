"""Finds the base images of a Dockerfile as the engine's classic builder reads it, and pins them by id.

Only the instructions that name images are understood: FROM, COPY --from, and each ARG before the first FROM.
Malformed lines are skipped: the engine reports them itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^}]*))?\})", re.ASCII)
_GOES_ON = re.compile(r"\\[ \t]*$")
_NO_IMAGE = "scratch"


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction, joined from its lines. `first`: its first line, from 0; `name`: in capitals."""

    first: int
    lines: int
    name: str
    rest: str

    @property
    def flags(self) -> list[str]:
        """Words with two dashes at the beginning."""
        words = self.rest.split()
        count = next((n for n, word in enumerate(words) if not word.startswith("--") or word == "--"), len(words))
        return words[:count]

    @property
    def arguments(self) -> list[str]:
        """Words after the flags."""
        return self.rest.split()[len(self.flags) :]


@dataclass(frozen=True, slots=True)
class BaseImage:
    """An image that the recipe does not build itself, and the instruction that names it."""

    reference: str
    at: Instruction

    def on(self, image_id: str) -> str:
        """Returns the instruction with the image's id in place of its name."""
        if self.at.name == "FROM":
            return " ".join(["FROM", *self.at.flags, image_id, *self.at.arguments[1:]])
        return f"{self.at.name} {self.at.rest.replace(f'--from={self.reference}', f'--from={image_id}', 1)}"


class Dockerfile:
    """A recipe, with the values of its build arguments."""

    def __init__(self, text: str, values: Mapping[str, str] | None = None) -> None:
        self._lines = text.removeprefix("\ufeff").split("\n")
        self._values = values or {}

    @cached_property
    def instructions(self) -> list[Instruction]:
        return list(self._instructions())

    @cached_property
    def bases(self) -> list[BaseImage]:
        """Base images in the order of the recipe."""
        return list(self._bases())

    def takes(self, argument: str) -> bool:
        """Whether the recipe declares an argument of this name anywhere."""
        declared = (word for one in self.instructions if one.name == "ARG" for word in one.rest.split())
        return any(word.partition("=")[0] == argument for word in declared)

    def on(self, ids: Mapping[str, str]) -> str:
        """Returns the recipe with ids in place of these references. Every other line stays where and what it was."""
        lines = list(self._lines)
        for base in self.bases:
            if (image_id := ids.get(base.reference)) is not None:
                first, count = base.at.first, base.at.lines
                lines[first : first + count] = [base.on(image_id), *[""] * (count - 1)]
        return "\n".join(lines)

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
                reference = expanded(written, values)
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
            elif given:
                values[name] = expanded(default, values)

    def _instructions(self) -> Iterator[Instruction]:
        number = 0
        while number < len(self._lines):
            first, goes_on = number, True
            parts: list[str] = []
            while goes_on and number < len(self._lines):
                line = self._lines[number].rstrip("\r")
                number += 1
                passed_over = line.lstrip().startswith("#") or not line.strip()
                if passed_over and parts:
                    continue  # a comment or empty line does not end an instruction
                goes_on = not passed_over and _GOES_ON.search(line) is not None
                parts.append("" if passed_over else _GOES_ON.sub("", line))
            name, *rest = "".join(parts).split(None, 1) or [""]
            if name:
                yield Instruction(first, number - first, name.upper(), rest[0].strip() if rest else "")


def expanded(word: str, values: Mapping[str, str]) -> str:
    """Expands `$NAME`, `${NAME}`, `${NAME:-otherwise}`, `${NAME:+instead}` and quotes; without a value: empty."""

    def value(found: re.Match[str]) -> str:
        given, operator, other = values.get(found[1] or found[2]), found[3] or "", found[4] or ""
        is_set = bool(given) if operator.startswith(":") else given is not None
        if operator.endswith("+"):
            return other if is_set else ""
        return given or "" if is_set else other

    return _VARIABLE.sub(value, word.replace('"', "").replace("'", ""))
