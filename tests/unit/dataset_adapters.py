"""Row adapters and rows for tests of where datasets come from: rules as simple as rules can be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from app.artifacts.bundles import pack
from app.datasets.base import Reading, Row, RowAdapter
from app.datasets.source import open_dataset
from app.models.spec import AgentTask, EnvironmentSpec, TestsGoal


class PlainRows:
    """Tasks of one test each, in the image that the row names."""

    name: ClassVar[str] = "plain"
    columns: ClassVar[frozenset[str]] = frozenset({"instance_id", "statement"})

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return "plain_column" in row

    def task(self, row: Row, reading: Reading) -> AgentTask:
        statement = row.values.get("statement")
        if not isinstance(statement, str):
            raise row.place.fault("statement", "a text", statement)
        return AgentTask(
            name=str(row.values.get("instance_id") or f"{row.values['org']}__{row.values['repo']}-7"),
            dataset=row.dataset,
            description=statement,
            environment=EnvironmentSpec(image="busybox", kind=reading.kind),
            goal=TestsGoal(
                base_commit="HEAD",
                test_command="true",
                fail_to_pass=("t",),
                pass_to_pass=tuple(row.values.get("kept", ())),
            ),
        )


class OtherRows(PlainRows):
    name: ClassVar[str] = "other"

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return "other_column" in row


class NumberedRows(PlainRows):
    """Rows without a name of their own, as Multi-SWE-bench's are."""

    name: ClassVar[str] = "numbered"
    columns: ClassVar[frozenset[str]] = frozenset({"org", "repo", "number", "statement"})

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return False


ADAPTERS: Mapping[str, RowAdapter] = {"plain": PlainRows(), "other": OtherRows(), "numbered": NumberedRows()}


def reading() -> Reading:
    """Stores nothing."""
    return Reading(pack=lambda folder: pack(folder)[0])


def load(argument: object, reading: Reading) -> list[AgentTask]:
    """All tasks of a dataset."""
    dataset = open_dataset(str(argument), reading)
    dataset.entries()
    return list(dataset.tasks())


def row(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A row that is well formed; a change to None leaves the column out."""
    values = {"instance_id": f"a__b-{number}", "statement": "Do it.", "plain_column": 1, **changes}
    return {key: value for key, value in values.items() if value is not None}


def write(file: Path, rows: Sequence[dict[str, Any] | str]) -> Path:
    """JSON lines; a text is a line as it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows))
    return file


def parquet(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """The same as parquet."""
    import pyarrow
    from pyarrow.parquet import write_table

    file.parent.mkdir(parents=True, exist_ok=True)
    write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file
