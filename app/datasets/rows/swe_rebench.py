"""Reads SWE-rebench: rows that include their specification in `install_config`, and their image.

First version, for Python: the fork of SWE-bench that its authors publish uses `install_config` instead of SWE-bench's
own table: activation, `eval_commands`, `install` after the patch, then `test_cmd` with the files of the test patch. V2,
for twenty languages: each row has test commands and the name of a parser. The repository is in `/<repo>`; its
evaluation stops at the first command that fails, and names no test files.

Source: SWE-rebench/SWE-bench-fork, harness/test_spec/python.py (make_eval_script_list_py) and test_spec.py;
SWE-rebench/SWE-rebench-V2, scripts/eval.py (evaluate_instance, run_in_container, _normalize_test_name) and sample.json;
the dataset cards nebius/SWE-rebench, nebius/SWE-rebench-leaderboard and nebius/SWE-rebench-V2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import CONDA, image_of, script
from app.datasets.rows.goals import NEEDED, judged_by_parser, named_tests, patched_files, row_task, swebench_parser
from app.models.spec import AgentTask, JudgeName, TestsGoal

_V2_COLUMN = "pr_description"
"""Column that only rows of the second version have."""
DURATIONS = (
    r"(?i)\s*\[\s*\d+(?:\.\d+)?\s*m?s\s*\]\s*$",
    r"(?i)\s+in\s+\d+(?:\.\d+)?\s+m?sec\b",
    r"(?i)\s*\(\s*\d+(?:\.\d+)?\s*m?s\s*\)\s*$",
)
"""Patterns that its evaluation removes from both the reported and the expected names, one after the other."""


class SweRebenchRows:
    """Rules of SWE-rebench, first version."""

    name: ClassVar[str] = "swe-rebench"
    columns: ClassVar[frozenset[str]] = NEEDED | {"install_config", "test_patch"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return present(row) >= {"install_config", "environment_setup_commit"} and _V2_COLUMN not in present(row)

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        columns.none_of([_V2_COLUMN], "such rows are SWE-rebench V2's: say swe-rebench-v2=PATH")
        with row.place.named():
            return row_task(
                row,
                columns,
                reading,
                _goal(columns, reading),
                image=image_of(columns, "docker_image", "image_name", owner="swerebench"),
                commands=CONDA,
            )


def _goal(columns: RowColumns, reading: Reading) -> TestsGoal:
    config = columns.inner("install_config")
    test_patch = columns.patch("test_patch", needed=True)
    parser = swebench_parser(config, reading, config.text("log_parser"))
    before = script(CONDA, *config.commands_or_none("eval_commands"))
    install = config.text("install") if config.given("install") else ""
    return TestsGoal(
        base_commit=columns.commit(),
        test_patch=test_patch,
        install_command=script(before, install) if install else "",
        test_command=script(before, " ".join((config.text("test_cmd"), *patched_files(test_patch)))),
        judge=JudgeName.SWEBENCH_5,
        log_parser=parser,
        row=judged_by_parser(columns),
        **named_tests(columns),
    )


class SweRebenchV2Rows:
    """Rules of SWE-rebench V2."""

    name: ClassVar[str] = "swe-rebench-v2"
    columns: ClassVar[frozenset[str]] = NEEDED | {"install_config", "test_patch", "image_name"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return present(row) >= {"install_config", _V2_COLUMN}

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        _, repository = columns.repository()
        with row.place.named():
            return row_task(
                row,
                columns,
                reading,
                _goal_v2(columns, reading),
                image=columns.text("image_name"),
                workdir=f"/{repository}",
            )


def _goal_v2(columns: RowColumns, reading: Reading) -> TestsGoal:
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
"""Longest name that the grader removes a duration from: the patterns are slow on a hostile name."""


def _lasting(name: str) -> str:
    """Returns the test's name without the duration from when the row was made."""
    for pattern in DURATIONS if len(name) <= _LONGEST_NAME else ():
        name = re.sub(pattern, "", name)
    return name.strip()
