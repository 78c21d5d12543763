"""Files of rows, as users have them: what is read, which rules are taken, and how a fault is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.artifacts.bundles import pack
from app.datasets import load
from app.datasets.base import Reading
from app.errors import DatasetInvalid
from app.models.spec import Bundle, EnvironmentKind
from tests.unit.row_reading import library
from tests.unit.test_rows_own import ROW


def write(tmp_path: Path, *rows: dict[str, Any] | str, name: str = "rows.jsonl") -> Path:
    file = tmp_path / name
    # Not ASCII only: a line separator inside a row must not cut it.
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows))
    return file


def reading(kind: EnvironmentKind = EnvironmentKind.DOCKER) -> Reading:
    return Reading(pack=lambda folder: pack(folder)[0], kind=kind, describe=library)


def test_a_build_context_beside_the_file_is_stored_once(tmp_path: Path) -> None:
    context = tmp_path / "images" / "one"
    context.mkdir(parents=True)
    (context / "Dockerfile").write_text("FROM scratch\n")
    stored: list[Path] = []

    def note(folder: Path) -> Bundle:
        stored.append(folder)
        return pack(folder)[0]

    more = {"image_name": None, "build_context": "images/one"}
    write(tmp_path, *({**ROW, **more, "instance_id": f"a__b-{number}"} for number in range(2)))
    tasks = load(str(tmp_path), Reading(pack=note, kind=EnvironmentKind.LOCAL))
    assert stored == [context.resolve()]
    assert [task.environment.kind for task in tasks] == [EnvironmentKind.LOCAL] * 2
    assert all(task.environment.build and task.environment.image is None for task in tasks)


def test_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match="expected one task of each name; found 'psf__requests-1' twice"):
        load(str(write(tmp_path, ROW, ROW)), reading())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{", "row 2: expected JSON; found"), ("[1]", "row 2: expected a JSON object"), ("[" * 100_000, "expected JSON")],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        load(str(write(tmp_path, ROW, line)), reading())


def test_a_file_that_is_not_text_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DatasetInvalid, match="UTF-8"):
        load(str(tmp_path / "a.jsonl"), reading())
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DatasetInvalid, match="at least one row"):
        load(str(tmp_path / "b.jsonl"), reading())
