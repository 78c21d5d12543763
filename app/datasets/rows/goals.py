"""Builds parts of goals that several datasets share: named tests, the files of a test patch, known parsers."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from typing import Any

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns
from app.datasets.rows.environments import NOT_TESTS, environment_of
from app.errors import UnknownName, UnknownToLibrary
from app.models.reports import TESTS_AS_JSON
from app.models.spec import AgentTask, JudgeName, PatchSolution, TestsGoal

NEEDED = frozenset({"instance_id", "repo", "base_commit", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS"})
"""Columns of SWE-bench that later datasets kept."""


def named_tests(
    columns: RowColumns, fail: str = "FAIL_TO_PASS", kept: str = "PASS_TO_PASS", *, literals: bool = False
) -> dict[str, Any]:
    """Returns keywords of `TestsGoal`. Raises: DatasetInvalid: also when no test is named."""
    tests = {
        "fail_to_pass": columns.names(fail, literals=literals),
        "pass_to_pass": columns.names(kept, literals=literals),
    }
    if not any(tests.values()):
        raise columns.fault(fail, f"at least one test here or in {kept}")
    return tests


def gold(
    columns: RowColumns, reading: Reading, column: str = "patch", *, reverse: bool = False
) -> PatchSolution | None:
    """Returns the row's answer; None if it has none. Raises: DatasetInvalid: when strict, if it is empty."""
    patch = columns.patch(column)
    if reading.strict and not patch.strip() and columns.values.get(column) is not None:
        raise columns.fault(column, "the gold patch, or no such column")
    return PatchSolution(patch=patch, reverse=reverse) if patch.strip() else None


def row_task(
    row: Row, columns: RowColumns, reading: Reading, goal: TestsGoal, *, reverse: bool = False, **environment: Any
) -> AgentTask:
    """Returns the task of a row with SWE-bench's columns. environment: for `environment_of`; reverse: for `gold`."""
    return AgentTask(
        name=columns.name(),
        dataset=row.dataset,
        description=columns.text("problem_statement"),
        environment=environment_of(columns, reading, **environment),
        goal=goal,
        solution=gold(columns, reading, reverse=reverse),
    )


def patched_files(test_patch: str) -> tuple[str, ...]:
    """Returns the files that a test command names, quoted: all of the patch except those of `NOT_TESTS`.

    Source: swebench 4.1.0, get_test_directives; it does not leave out files that the patch deletes.
    """
    files: list[str] = []
    for line in test_patch.split("\n"):  # like `diff --git a/.* b/(.*)`, which is slow on a hostile line
        start, end = line.find("diff --git a/"), line.rfind(" b/")
        files += [line[end + 3 :]] if -1 < start <= end - len("diff --git a/") else []
    return tuple(shlex.quote(file) for file in files if not file.endswith(NOT_TESTS))


def described(
    columns: RowColumns, reading: Reading, judge: JudgeName, row: Mapping[str, Any], column: str
) -> dict[str, Any]:
    """Returns the grading library's description of the row.

    Raises: DatasetInvalid: it does not know a column's value, `column` if it does not name one; GradingFailed.
    """
    try:
        return reading.describe(judge, row)
    except UnknownName as error:
        if isinstance(error, UnknownToLibrary) and error.column in columns.values:
            column = error.column
        raise columns.fault(column, f"one that {judge.value} knows", str(error)) from error


EVERY_TEST = "pass_and_fail"
"""Rule of swebench 5 by which every named test must pass; the other rule counts only reported failures."""


def judged_by_parser(columns: RowColumns) -> dict[str, Any]:
    """Returns the columns that swebench 5's grader needs of a row of another format."""
    return {**columns.carried("instance_id", "repo"), "eval_type": EVERY_TEST}


def swebench_parser(columns: RowColumns, reading: Reading, name: str, column: str = "log_parser") -> str:
    """Returns the name of a parser of swebench 5 unchanged. Raises: DatasetInvalid: there is none of that name."""
    request = {"log_parser": name, "image": "", "eval_script": "", "eval_type": EVERY_TEST}
    described(columns, reading, JudgeName.SWEBENCH_5, request, column)
    return name


def library_text(answer: Mapping[str, Any], key: str) -> str:
    """Returns a text of the library's answer, empty if it has none."""
    value = answer.get(key) or ""
    if not isinstance(value, str):
        raise TypeError(f"expected text of the grading library below {key!r}; found {type(value).__name__}")
    return value


# A row's own parser is a program. It never runs on a host, only in the task's container, after the tests. Its report is
# printed last by the command, and `app.grading.reports` reads it.


def written(path: str, content: str) -> str:
    """Returns the command that writes a file with any content."""
    end = f"END_{hashlib.sha256(content.encode('utf-8', 'replace')).hexdigest()[:24]}"
    line = "" if content.endswith("\n") else "\n"
    return f"cat >{path} <<'{end}'\n{content}{line}{end}"


def printed(path: str) -> str:
    """Returns the command that prints a report, and exits with the code of the command before it."""
    return f"code=$?\necho\necho '{TESTS_AS_JSON}'\ncat {path}\nexit $code"
