"""Reads files of rows: a .jsonl file, a .json list, or a folder with rows.jsonl. The rules: `app.datasets.rows`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from app.datasets.base import Packed, Reading, Row
from app.datasets.faults import FaultPlace, shown
from app.datasets.rows import adapter_of
from app.errors import DatasetInvalid
from app.models.spec import AgentTask
from app.task_files import inside


class SweBenchFormat:
    """Rows of any dataset that can be told by its columns."""

    name: ClassVar[str] = "swebench"

    def recognises(self, path: Path) -> bool:
        return path.suffix in (".jsonl", ".json") if path.is_file() else (path / "rows.jsonl").is_file()

    def read(self, path: Path, reading: Reading) -> list[AgentTask]:
        file = path / "rows.jsonl" if path.is_dir() else path
        dataset = path.name if path.is_dir() else path.stem
        if path.is_dir():
            inside(path, file)
        once = dataclasses.replace(reading, pack=Packed(reading).bundle)
        rows = (Row(values, place, dataset, file.parent) for values, place in _rows(file))
        tasks = [adapter_of(row).task(row, once) for row in rows]
        if not tasks:
            raise DatasetInvalid(f"{file}: expected at least one row; found none")
        return tasks


def _rows(file: Path) -> Iterator[tuple[dict[str, Any], FaultPlace]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetInvalid(f"{file}: expected a readable file in UTF-8; found {error}") from error
    numbered = _of_list(file, text) if file.suffix == ".json" else _of_lines(file, text)
    for number, row in numbered:
        if not isinstance(row, dict):
            raise DatasetInvalid(f"{file}, row {number}: expected a JSON object; found {shown(row)}")
        name = row.get("instance_id")
        known_as = (
            f" ({name if name.isprintable() and len(name) <= 200 else shown(name)})" if isinstance(name, str) else ""
        )
        yield row, FaultPlace(f"{file}, row {number}{known_as}")


def _of_lines(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    # Not splitlines: JSON strings may hold separators that it would cut at.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _json(line, f"{file}, row {number}")


def _of_list(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    rows = _json(text, str(file))
    if not isinstance(rows, list):
        raise DatasetInvalid(
            f"{file}: expected a JSON list of rows; found {shown(rows)}; one row a line goes by .jsonl"
        )
    yield from enumerate(rows, start=1)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetInvalid(f"{where}: expected JSON; found {error}") from error
