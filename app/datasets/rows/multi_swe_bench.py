"""Reads Multi-SWE-bench (mini, flash) and Multi-SWE-RL: pull requests in many languages, graded by three test runs.

The image has the scripts: `/home/fix-run.sh` applies `/home/test.patch` and `/home/fix.patch` and runs the tests in
`/home/<repo>`. The row has the results of the runs without any patch and with only the test patch. The package
multi-swe-bench finds image and script by the row's repository, and compares the third run with them. The image also has
the answer at `/home/fix.patch`, so both patches are removed before an agent acts in it; the grading writes them anew.

Source: multi-swe-bench 1.1.2, harness/image.py (image_name, fix_patch_path), harness/repos (image_prefix, image_tag,
fix_patch_run), harness/instance.py (create), harness/dataset.py and report.py (check); prompts for agents:
multi-swe-bench/MagentLess, agentless/multilang/utils.py (process).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import environment_of
from app.datasets.rows.goals import described, gold, library_text
from app.models.spec import AgentTask, JudgeName, TestsGoal

_FIXED = ("f2p_tests", "s2p_tests", "n2p_tests")
_CARRIED = (
    *("org", "repo", "number", "base", "number_interval", "tag", "lang"),
    *("run_result", "test_patch_result", "fixed_tests", "p2p_tests", *_FIXED),
)
_COUNTED = ("passed", "failed", "skipped")
FIX_PATCH, TEST_PATCH = "/home/fix.patch", "/home/test.patch"


class MultiSweBenchRows:
    """Rules of Multi-SWE-bench and Multi-SWE-RL."""

    name: ClassVar[str] = "multi-swe-bench"
    columns: ClassVar[frozenset[str]] = frozenset(
        {"org", "repo", "number", "base", "resolved_issues", "fix_patch", "test_patch", "f2p_tests", "p2p_tests"}
        | {"run_result", "test_patch_result"}
    )

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return present(row) >= {"org", "repo", "number", "base", "fix_patch"}

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        organisation, repository = columns.folder_name("org"), columns.folder_name("repo")
        number = columns.number("number")
        with row.place.named():
            goal, image = _goal(columns, reading)
            return AgentTask(
                name=columns.name() if columns.given("instance_id") else f"{organisation}__{repository}-{number}",
                dataset=row.dataset,
                description=_issue(columns),
                environment=environment_of(
                    columns,
                    reading,
                    image=f"docker.io/{image}",
                    workdir=f"/home/{repository}",
                    setup=(f"rm -f {FIX_PATCH} {TEST_PATCH}",),
                ),
                goal=goal,
                solution=gold(columns, reading, "fix_patch"),
            )


def _issue(columns: RowColumns) -> str:
    """Returns the first issue that the pull request resolves, in the form of the dataset's own prompts."""
    issues = columns.values["resolved_issues"]
    if not isinstance(issues, list) or not issues or not isinstance(issues[0], dict):
        raise columns.fault("resolved_issues", "a list of issues with title and body, one at least")
    first = RowColumns(issues[0], columns.place, "resolved_issues.")
    return f"{first.text_or_nothing('title')}\n{first.text_or_nothing('body')}".strip()


def _goal(columns: RowColumns, reading: Reading) -> tuple[TestsGoal, str]:
    for column in ("run_result", "test_patch_result"):
        _check_result(columns.inner(column))
    fixed = [name for column in _FIXED for name in _tests(columns, column)]
    if not fixed:
        raise columns.fault("f2p_tests", f"at least one test in {', '.join(_FIXED)}")
    carried = columns.carried(*_CARRIED)
    for column in ("number_interval", "tag", "lang"):
        columns.text_or_nothing(column)
    answer = described(columns, reading, JudgeName.MULTI_SWE_BENCH, carried, "repo")
    goal = TestsGoal(
        base_commit=columns.inner("base").commit("sha"),
        test_patch=columns.patch("test_patch", needed=True),
        test_command=library_text(answer, "test_command"),
        judge=JudgeName.MULTI_SWE_BENCH,
        log_parser=library_text(answer, "parser"),
        fail_to_pass=tuple(dict.fromkeys(fixed)),
        pass_to_pass=tuple(_tests(columns, "p2p_tests")),
        patch_path=FIX_PATCH,
        test_patch_path=TEST_PATCH,
        row=carried,
    )
    return goal, library_text(answer, "image")


def _tests(columns: RowColumns, column: str) -> list[str]:
    if not columns.given(column):
        return []
    runs_by_test = columns.values[column]
    if not isinstance(runs_by_test, Mapping) or not all(
        isinstance(runs, Mapping) and runs.keys() >= {"run", "test", "fix"} for runs in runs_by_test.values()
    ):
        raise columns.fault(column, "an object from test names to their status in the runs `run`, `test` and `fix`")
    return list(runs_by_test)


def _check_result(result: RowColumns) -> None:
    """Checks a run's three lists of test names against their counts. Raises: DatasetInvalid."""
    for kind in _COUNTED:
        names = result.names(f"{kind}_tests")
        if result.number(f"{kind}_count") != len(set(names)):
            raise result.fault(f"{kind}_count", f"{len(set(names))}, as many as {kind}_tests names")
