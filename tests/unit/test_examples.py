"""The examples: each compiles, and what it imports of MegaFlow is there."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.py")), ids=lambda file: file.name)
def test_an_example_compiles_and_names_what_there_is(file: Path) -> None:
    tree = ast.parse(file.read_text())
    compile(tree, file.name, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("app", "megaflow"):
            module = import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name) or import_module(f"{module.__name__}.{name.name}"), name.name


def test_each_adapter_has_an_example() -> None:
    adapters = {file.stem for file in (ROOT / "app/experience/adapters").glob("*.py")} - {"__init__", "rows"}
    assert adapters
    used = "".join(file.read_text() for file in (ROOT / "examples/training").glob("*.py"))
    missing = [one for one in adapters if f"from app.experience.adapters import {one}" not in used]
    assert not missing
