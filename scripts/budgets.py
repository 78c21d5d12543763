"""Holds the sizes that budgets.toml allows: lines of source by package, files, functions, repeated class names.

python scripts/budgets.py            names what is over its budget, exit 1
python scripts/budgets.py --write    lowers every budget to what is there; never raises one
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "budgets.toml"
_SOURCES = ("*.py", "*.c", "*.h", "*.html", "*.css", "*.js")
_LEFT_OUT = ("datasets/demo", "static/vendor")
"""Tasks for agents, which are data, and what others wrote."""


def lines(folder: Path) -> int:
    """Lines of source below a folder, or of one file."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files(folder))


def files(folder: Path) -> list[Path]:
    """The sources below a folder."""
    if folder.is_file():
        return [folder]
    found = [file for pattern in _SOURCES for file in folder.rglob(pattern)]
    return [file for file in found if not any(part in file.as_posix() for part in _LEFT_OUT)]


def shapes(folder: Path) -> dict[str, int]:
    """The longest function, the longest file, and how many class names occur more than once."""
    longest_function, names = 0, Counter[str]()
    for file in files(folder):
        if file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                longest_function = max(longest_function, (node.end_lineno or node.lineno) - node.lineno + 1)
            elif isinstance(node, ast.ClassDef):
                names[node.name.lstrip("_")] += 1
    return {
        "longest function": longest_function,
        "longest file": max(lines(file) for file in files(folder)),
        "class names that occur twice": sum(count > 1 for count in names.values()),
    }


def measured(budgets: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Measures the tree, in the shape of the budgets."""
    found = shapes(ROOT / "app")
    return {
        "lines": {place: lines(ROOT / place) for place in budgets["lines"]},
        "files": {place: len(files(ROOT / place)) for place in budgets["files"]},
        "app": {name: found[name] for name in budgets["app"]},
    }


def written(budgets: dict[str, dict[str, int]]) -> str:
    """The file's text."""
    parts = [
        "# What scripts/budgets.py holds. Raising a number is a commit of its own, with the reason; lower them by\n"
        "# `python scripts/budgets.py --write`.\n"
    ]
    for table, values in budgets.items():
        parts.append(f"\n[{table}]\n" + "".join(f'"{name}" = {value}\n' for name, value in values.items()))
    return "".join(parts)


def _room(table: str, value: int) -> int:
    """Round lines up to the next hundred: a small fix needs no new budget."""
    return -(-value // 100) * 100 if table == "lines" else value


def main() -> int:
    budgets = tomllib.loads(FILE.read_text())
    found = measured(budgets)
    if "--write" in sys.argv:
        lowered = {
            table: {name: min(most, _room(table, found[table][name])) for name, most in values.items()}
            for table, values in budgets.items()
        }
        FILE.write_text(written(lowered))
        return 0
    over = [
        f"budgets: {table}: {name}: expected at most {most:,}, found {found[table][name]:,}"
        for table, values in budgets.items()
        for name, most in values.items()
        if found[table][name] > most
    ]
    print("\n".join(over) or "budgets: all held")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
