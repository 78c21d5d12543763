"""Task folders of both formats, as small as they can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NOTHING: Mapping[str, str] = {}


def files(folder: Path, contents: Mapping[str, str]) -> Path:
    """The folder, with these files."""
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def harbor(folder: Path, toml: str = 'version = "1.0"\n', more: Mapping[str, str] = NOTHING) -> Path:
    usual = {
        "task.toml": toml,
        "instruction.md": "Do it.",
        "environment/Dockerfile": "FROM x\nWORKDIR /app\n",
        "tests/test.sh": "true",
        "solution/solve.sh": "true",
    }
    return files(folder, {**usual, **more})


def terminal_bench(folder: Path, more: Mapping[str, str] = NOTHING) -> Path:
    usual = {
        "task.yaml": "instruction: Do it.\n",
        "Dockerfile": "FROM x\nWORKDIR /app\n",
        "docker-compose.yaml": "services: {client: {build: .}}\n",
        "run-tests.sh": "true",
        "solution.sh": "true",
        "tests/test_it.py": "",
    }
    return files(folder, {**usual, **more})
