"""Refuses private words as names, and riddles in prose: words.toml lists them, with what to use instead.

python scripts/words.py            names each place, exit 1
python scripts/words.py --count    how many there are, by word
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "words.toml"
_CODE = ("app", "megaflow", "scripts")
_PROSE = ("*.md", "docs/**/*.md", "app/**/*.md")
_LEFT_OUT = "datasets/demo"
"""Tasks for agents: data, whatever their words are."""
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_TABLE = "__tablename__"
_LOGGING = ("debug", "info", "warning", "error", "exception")


def names(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, kind and name of everything in a Python file whose name a reader meets."""
    yield 1, "module", file.stem
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef():
                yield node.lineno, "class", node.name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, "function", node.name
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(table))) if name == _TABLE:
                yield node.lineno, "table", table
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level), args=[ast.Constant(value=event)]):
                if level in _LOGGING and isinstance(event, str):
                    yield node.lineno, "log event", event


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those behind attributes too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)


def first_words(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, name and first word of the docstring of each module, class and function."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), getattr(node, "name", file.stem), text.split()[0].strip(",.:;")


def findings() -> Iterator[tuple[str, str]]:
    """The word, and where it stands with what to do."""
    words = tomllib.loads(FILE.read_text())
    openings = set(words["prose"]["openings"])
    allowed, refused = words["allowed"], re.compile(rf"\b({'|'.join(words['prose']['refused'])})\b", re.IGNORECASE)
    for file in _python():
        where = file.relative_to(ROOT).as_posix()
        for line, kind, name in names(file):
            if name.startswith("test_"):  # a sentence, not a name
                continue
            for part in {part.lower() for part in _PARTS.findall(name)} & words["names"].keys():
                if f"{where}:{name}" not in allowed and name not in allowed:
                    yield part, f"{where}:{line}: {kind} `{name}`: instead of `{part}` use {words['names'][part]}"
        for line, name, word in first_words(file):
            if word in openings:
                yield word, f"{where}:{line}: docstring of `{name}` begins with `{word}`: begin with a verb or a noun"
        for line, text in docstrings(file):
            for match in refused.finditer(text):
                yield match[0].lower(), f"{where}:{line}: docstring says `{match[0]}`: say who, or how many"
    for pattern in _PROSE:
        for file in sorted(ROOT.glob(pattern)):
            if _LEFT_OUT in file.as_posix():
                continue
            for line, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                for match in refused.finditer(text):
                    where = f"{file.relative_to(ROOT).as_posix()}:{line}"
                    yield match[0].lower(), f"{where}: says `{match[0]}`: say who, or how many"


def _python() -> Iterator[Path]:
    for folder in _CODE:
        yield from (file for file in sorted((ROOT / folder).rglob("*.py")) if _LEFT_OUT not in file.as_posix())


def main() -> int:
    found = list(findings())
    if "--count" in sys.argv:
        for word, count in Counter(word for word, _ in found).most_common():
            print(f"{count:5} {word}")
        return 0
    for _, text in found:
        print(text)
    print(f"words: {len(found)} to change" if found else "words: none refused")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
