"""What a fixture is: tasks as one dataset publishes them, and the images in which they run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.matrix.repository import FIXED, KEPT, SENTENCE, TEST_FILE, Image, Patches, write

TaskRow = dict[str, Any]


class Kind(StrEnum):
    """The three tasks of a fixture."""

    RIGHT = "right"
    WRONG = "wrong"
    PECULIAR = "peculiar"


@dataclass(frozen=True)
class Fixture:
    """One dataset's three tasks. Its verdicts are derived by hand: the answer of `WRONG` gets 0, the others' 1."""

    dataset: str  # the name by which its rules are known
    title: str  # as the paper's table has it
    source: str  # of the schema that its rows are written from
    peculiarity: str
    names: Mapping[Kind, str]
    images: tuple[Image, ...] = ()
    rows: tuple[TaskRow, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # beside the rows; of task folders, all there is
    in_table: bool = True  # of the paper's ten

    def expected(self, agent: str, kind: Kind) -> float:
        """The reward that is right."""
        return 0.0 if agent in ("nop", "cheat") or (agent == "oracle" and kind is Kind.WRONG) else 1.0

    def write(self, folder: Path) -> str:
        """Write it below `folder`; the argument that names it to a submission."""
        place = folder / self.title.lower().replace(" ", "-")
        place.mkdir(parents=True)
        write(place, self.files)
        if not self.rows:
            return str(place)
        (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in self.rows))
        return f"{self.dataset}={place / 'rows.jsonl'}"


KINDS = tuple(Kind)
PYTEST_FIXED = f"{TEST_FILE}::{FIXED}"
PYTEST_KEPT = tuple(f"{TEST_FILE}::{name}" for name in KEPT)


def named(pattern: str) -> dict[Kind, str]:
    """Names by kind, from a pattern with one place for a number."""
    return {kind: pattern.format(number) for number, kind in enumerate(KINDS, 1)}


def classic(patches: Patches, kind: Kind, name: str, repo: str, version: str, **more: Any) -> TaskRow:
    """A row with SWE-bench's columns. Source: the dataset card SWE-bench/SWE-bench."""
    return {
        "repo": repo, "instance_id": name, "base_commit": patches.base,
        "patch": patches.wrong if kind is Kind.WRONG else patches.right, "test_patch": patches.hidden,
        "problem_statement": f"{SENTENCE}\nCorrect it.", "hints_text": "", "created_at": "2025-01-02T03:04:05Z",
        "version": version, "FAIL_TO_PASS": json.dumps([PYTEST_FIXED]), "PASS_TO_PASS": json.dumps(PYTEST_KEPT),
        "environment_setup_commit": patches.base, **more,
    }  # fmt: skip


def without(row: TaskRow, *columns: str) -> TaskRow:
    """The row without these columns."""
    return {column: value for column, value in row.items() if column not in columns}
