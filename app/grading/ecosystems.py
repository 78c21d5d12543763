"""Reads `ecosystems.toml`: the files of each language, and their lines, that affect a test run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_ECOSYSTEMS: list[dict[str, Any]] = list(
    tomllib.loads(Path(__file__).with_name("ecosystems.toml").read_text(encoding="utf-8")).values()
)


def _paths(patterns: Iterable[str]) -> re.Pattern[str]:
    forms = [re.escape(one).replace(r"\*", "[^/]*") + (".+" if one.endswith("/") else "") for one in patterns]
    return re.compile(f"(?:.*/)?(?:{'|'.join(forms)})", re.DOTALL)


_RESTORED, _INSTALLED = (
    _paths(path for part in _ECOSYSTEMS for path in part.get(kind, ())) for kind in ("restored", "installed")
)
_KINDS = ("added", "removed", "changed")
_LOOKS = [
    (_paths(look["files"]), kind, re.compile(look[kind]))
    for part in _ECOSYSTEMS
    for look in part.get("look", ())
    for kind in _KINDS
    if kind in look
]
"""Rules: files, the kind of their lines to check, and the words."""


def is_restored(path: str) -> bool:
    """Whether only a test runner of some language, or its tools, read this file of a repository."""
    return _RESTORED.fullmatch(path) is not None


def is_installed(path: str) -> bool:
    """Whether it is in a folder of installed packages, which may include a test runner."""
    return _INSTALLED.fullmatch(path) is not None


def is_build_file(path: str) -> bool:
    """Whether any change of its lines may affect a test run: build files, not sources."""
    return any(kind == "changed" and files.fullmatch(path) for files, kind, _ in _LOOKS)


def steering_words(path: str, added: Iterable[str], removed: Iterable[str]) -> Iterator[str]:
    """Yields words by which changed lines of this file affect a test run.

    A line that only moves, or only gets a comma at its end, does not count as changed.
    """
    coming, going = ({line.rstrip(", \t\r"): line for line in lines} for lines in (added, removed))
    new = [line for key, line in coming.items() if key not in going]
    removed_lines = [line for key, line in going.items() if key not in coming]
    lines = dict(zip(_KINDS, (new, removed_lines, [*new, *removed_lines]), strict=True))
    for files, kind, words in _LOOKS:
        if files.fullmatch(path):
            yield from (match[0] for line in lines[kind] for match in words.finditer(line))
