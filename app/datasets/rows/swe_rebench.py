"""SWE-rebench (v1): Python rows that bring their specification in `install_config`, and their image.

The fork of SWE-bench that its authors publish puts `install_config` where SWE-bench has its own table: activation,
`eval_commands`, `install` after the patch, then `test_cmd` with the files of the test patch.

Source: SWE-rebench/SWE-bench-fork, harness/test_spec/python.py (make_eval_script_list_py) and test_spec.py; the dataset
cards nebius/SWE-rebench and nebius/SWE-rebench-leaderboard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import CONDA, image_of, script
from app.datasets.rows.goals import NEEDED, judged_by_parser, named_tests, patched_files, row_task, swebench_parser
from app.models.spec import AgentTask, JudgeName, TestsGoal

V2_COLUMN = "pr_description"
"""Only the second version's rows have it."""


class SweRebenchRows:
    """The rules of SWE-rebench, first version."""

    name: ClassVar[str] = "swe-rebench"
    columns: ClassVar[frozenset[str]] = NEEDED | {"install_config", "test_patch"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return present(row) >= {"install_config", "environment_setup_commit"} and V2_COLUMN not in present(row)

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        columns.none_of([V2_COLUMN], "such rows are SWE-rebench V2's: say swe-rebench-v2=PATH")
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
