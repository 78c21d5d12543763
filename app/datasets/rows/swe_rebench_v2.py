"""SWE-rebench V2: rows in twenty languages, with an image, test commands and the name of a parser each.

The repository lies in `/<repo>`; its evaluation stops at the first command that fails, and names no test files.

Source: SWE-rebench/SWE-rebench-V2, scripts/eval.py (evaluate_instance, run_in_container, _normalize_test_name) and
sample.json; the dataset card nebius/SWE-rebench-V2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import script
from app.datasets.rows.goals import NEEDED, judged_by_parser, named_tests, row_task, swebench_parser
from app.datasets.rows.swe_rebench import V2_COLUMN
from app.models.spec import AgentTask, JudgeName, TestsGoal

DURATIONS = (
    r"(?i)\s*\[\s*\d+(?:\.\d+)?\s*m?s\s*\]\s*$",
    r"(?i)\s+in\s+\d+(?:\.\d+)?\s+m?sec\b",
    r"(?i)\s*\(\s*\d+(?:\.\d+)?\s*m?s\s*\)\s*$",
)
"""What its evaluation takes off both the reported and the expected names, one after the other."""


class SweRebenchV2Rows:
    """The rules of SWE-rebench V2."""

    name: ClassVar[str] = "swe-rebench-v2"
    columns: ClassVar[frozenset[str]] = NEEDED | {"install_config", "test_patch", "image_name"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return present(row) >= {"install_config", V2_COLUMN}

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        _, repository = columns.repository()
        with row.place.named():
            return row_task(
                row,
                columns,
                reading,
                _goal(columns, reading),
                image=columns.text("image_name"),
                workdir=f"/{repository}",
            )


def _goal(columns: RowColumns, reading: Reading) -> TestsGoal:
    config = columns.inner("install_config")
    tests = {kind: tuple(dict.fromkeys(map(_lasting, names))) for kind, names in named_tests(columns).items()}
    return TestsGoal(
        base_commit=columns.commit(),
        test_patch=columns.patch("test_patch", needed=True),
        test_command=script("set -e", *config.commands("test_cmd")),
        judge=JudgeName.SWEBENCH_5,
        log_parser=swebench_parser(config, reading, config.text("log_parser")),
        row={**judged_by_parser(columns), "left_out_of_names": list(DURATIONS)},
        fail_to_pass=tests["fail_to_pass"],
        pass_to_pass=tests["pass_to_pass"],
    )


_LONGEST_NAME = 8192
"""Of what the grader takes a duration from: the patterns are slow on a hostile one."""


def _lasting(name: str) -> str:
    """The test's name without how long it took when the row was made."""
    for pattern in DURATIONS if len(name) <= _LONGEST_NAME else ():
        name = re.sub(pattern, "", name)
    return name.strip()
