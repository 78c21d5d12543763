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
from app.datasets.rows.environments import CONDA, environment_of, image_by_id, script
from app.datasets.rows.goals import NEEDED, gold, judged_by_parser, named_tests, patched_files, swebench_parser
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
        instance_id = columns.name()
        image = _image(columns, instance_id)
        with row.place.named():
            return AgentTask(
                name=instance_id,
                dataset=row.dataset,
                description=columns.text("problem_statement"),
                environment=environment_of(columns, reading, image=image, commands=CONDA),
                goal=_goal(columns, reading),
                solution=gold(columns, reading),
            )


def _image(columns: RowColumns, instance_id: str) -> str:
    for column in ("docker_image", "image_name"):
        if columns.given(column):
            return columns.text(column)
    return image_by_id("swerebench", instance_id)


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
