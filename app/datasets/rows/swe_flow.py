"""Reads SWE-Flow: development steps whose hidden tests are in the repository, graded by pytest's exit code.

Its evaluation copies the image's /testbed to /workspace and checks out the base commit there; then the named tests must
all pass in one run of pytest.

Source: Hambaobao/SWE-Flow-Bench, sweflow_bench/utils/run_evaluation.py (evaluate_instance: 900 s) and data.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.goals import NEEDED, named_tests, row_task
from app.models.spec import AgentTask, JudgeName, TestsGoal

_WORKDIR = "/workspace"


class SweFlowRows:
    """Rules of SWE-Flow."""

    name: ClassVar[str] = "swe-flow"
    columns: ClassVar[frozenset[str]] = NEEDED | {"reference_commit", "docker_image"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return present(row) >= {"reference_commit", "docker_image"}

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        with row.place.named():
            goal = _goal(columns)
            setup = ("cp -r /testbed/. /workspace", f"git -C {_WORKDIR} checkout -q {shlex.quote(goal.base_commit)}")
            return row_task(
                row, columns, reading, goal, image=columns.text("docker_image"), workdir=_WORKDIR, setup=setup
            )


def _goal(columns: RowColumns) -> TestsGoal:
    tests = named_tests(columns)
    names = (shlex.quote(name) for name in (*tests["fail_to_pass"], *tests["pass_to_pass"]))
    return TestsGoal(
        base_commit=columns.commit(),
        test_command=f"python -m pytest -v {' '.join(names)}",
        judge=JudgeName.EXIT_CODE,
        **tests,
    )
