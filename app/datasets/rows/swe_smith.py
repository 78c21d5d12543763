"""Reads SWE-smith: bugs added to real repositories; `patch` is the bug, so the answer is its reverse.

One image serves all tasks of a repository at a commit. A task is a branch of its name with two commits: the bug, and on
top a commit that removes the failing tests. Agents start at the top. The evaluation restores the test files from the
commit below it and runs the test command of the repository's profile, which the package swesmith knows.

Source: swesmith 0.0.9, harness/utils.py (run_patch_in_container), harness/eval.py (is_gold), harness/gather.py and
profiles/base.py (get_container, get_test_cmd); the dataset card SWE-bench/SWE-smith.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import script
from app.datasets.rows.goals import described, library_text, named_tests, row_task
from app.models.spec import AgentTask, JudgeName, TestsGoal

_MIRROR = "swesmith"
"""Organisation of all its repositories."""
_RESTORE = """below={branch}~1
git diff -z --name-only --diff-filter=D "$below" {branch} | xargs -0 -r git checkout -q "$below" --
while IFS= read -r file; do
    if git cat-file -e "$below:$file" 2>/dev/null; then git checkout -q "$below" -- "$file"; fi
done <<'{end}'
{files}
{end}"""
_END = "END_OF_TEST_FILES"


class SweSmithRows:
    """Rules of SWE-smith."""

    name: ClassVar[str] = "swe-smith"
    columns: ClassVar[frozenset[str]] = frozenset(
        {"instance_id", "repo", "patch", "image_name", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS"}
    )

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return "image_name" in present(row) and str(row.get("repo")).startswith(f"{_MIRROR}/")

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        instance_id = columns.name()
        if columns.repository()[0] != _MIRROR:
            raise columns.fault(
                "repo", f"a repository of {_MIRROR}/", "the mirror at one commit, as the dataset has it"
            )
        if columns.text("repo") != (named := f"{_MIRROR}/{instance_id.rpartition('.')[0] or instance_id}"):
            raise columns.fault("repo", f"{named!r}, which the id {instance_id!r} names")
        with row.place.named():
            goal = _goal(columns, reading, instance_id)
            # A failed fetch is ignored, as in its own harness: newer images have the branches.
            setup = (f"git fetch -q || true; git checkout -q {shlex.quote(instance_id)} --",)
            return row_task(
                row,
                columns,
                reading,
                goal,
                reverse=True,
                image=columns.text("image_name"),
                setup=setup,
                commands=goal.test_command,
            )


def _goal(columns: RowColumns, reading: Reading, instance_id: str) -> TestsGoal:
    tests = named_tests(columns)
    request = {
        "instance_id": instance_id,
        "repo": columns.text("repo"),
        "patch": columns.text("patch"),
        "FAIL_TO_PASS": list(tests["fail_to_pass"]),
        "PASS_TO_PASS": list(tests["pass_to_pass"]),
    }
    answer = described(columns, reading, JudgeName.SWESMITH, request, "repo")
    return TestsGoal(
        base_commit=instance_id,
        test_command=script(_restored(columns, instance_id, tests, answer), library_text(answer, "test_command")),
        judge=JudgeName.SWESMITH,
        log_parser=library_text(answer, "parser"),
        row={"instance_id": instance_id, "repo": request["repo"]},
        **tests,
    )


def _restored(columns: RowColumns, branch: str, tests: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """Returns a script that restores the hidden tests and all test files, named by the library or by the tests' names.

    Names that are no file of the commit are skipped: test names of other languages contain no file.
    """
    listed = answer.get("test_files") or ()
    if not isinstance(listed, list | tuple):
        raise TypeError(f"expected a list of the grading library below 'test_files'; found {type(listed).__name__}")
    names = (name.partition("::")[0] for group in tests.values() for name in group)
    files = sorted({*map(str, listed), *names})
    if any("\n" in file or file == _END for file in files):
        raise columns.fault("FAIL_TO_PASS", "test names of one line each")
    return _RESTORE.format(branch=shlex.quote(branch), files="\n".join(files), end=_END)
