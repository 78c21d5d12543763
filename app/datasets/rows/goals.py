"""Parts of goals that several datasets share: named tests, the files of a test patch, known parsers."""

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
"""Columns of SWE-bench that the datasets made after it kept."""


def named_tests(
    columns: RowColumns, fail: str = "FAIL_TO_PASS", kept: str = "PASS_TO_PASS", *, literals: bool = False
) -> dict[str, Any]:
    """As keywords of `TestsGoal`. Raises: DatasetInvalid: also when no test is named."""
    found = {
        "fail_to_pass": columns.names(fail, literals=literals),
        "pass_to_pass": columns.names(kept, literals=literals),
    }
    if not any(found.values()):
        raise columns.fault(fail, f"at least one test here or in {kept}")
    return found


def gold(
    columns: RowColumns, reading: Reading, column: str = "patch", *, reverse: bool = False
) -> PatchSolution | None:
    """The row's answer; None where it has none. Raises: DatasetInvalid: to be strict, it is there and empty."""
    patch = columns.patch(column)
    if reading.strict and not patch.strip() and columns.values.get(column) is not None:
        raise columns.fault(column, "the gold patch, or no such column")
    return PatchSolution(patch=patch, reverse=reverse) if patch.strip() else None


def row_task(
    row: Row, columns: RowColumns, reading: Reading, goal: TestsGoal, *, reverse: bool = False, **environment: Any
) -> AgentTask:
    """The task of a row with SWE-bench's columns. environment: as of `environment_of`; reverse: as of `gold`."""
    return AgentTask(
        name=columns.name(),
        dataset=row.dataset,
        description=columns.text("problem_statement"),
        environment=environment_of(columns, reading, **environment),
        goal=goal,
        solution=gold(columns, reading, reverse=reverse),
    )


def patched_files(test_patch: str) -> tuple[str, ...]:
    """The files that a test command names, quoted: all of the patch but those of `NOT_TESTS`.

    Source: swebench 4.1.0, get_test_directives; it leaves out no file that the patch deletes.
    """
    files: list[str] = []
    for line in test_patch.split("\n"):  # `diff --git a/.* b/(.*)`, which takes long on a hostile line
        start, end = line.find("diff --git a/"), line.rfind(" b/")
        files += [line[end + 3 :]] if -1 < start <= end - len("diff --git a/") else []
    return tuple(shlex.quote(file) for file in files if not file.endswith(NOT_TESTS))


def described(
    columns: RowColumns, reading: Reading, judge: JudgeName, row: Mapping[str, Any], column: str
) -> dict[str, Any]:
    """What the grading library says.

    Raises: DatasetInvalid: it does not know what a column names, `column` where it does not say which; GradingFailed.
    """
    try:
        return reading.describe(judge, row)
    except UnknownName as error:
        if isinstance(error, UnknownToLibrary) and error.column in columns.values:
            column = error.column
        raise columns.fault(column, f"one that {judge.value} knows", str(error)) from error


EVERY_TEST = "pass_and_fail"
"""The rule of swebench 5 by which every named test must pass; the other counts only failures that are reported."""


def judged_by_parser(columns: RowColumns) -> dict[str, Any]:
    """What swebench 5's judge needs of a row that is no 5.x row."""
    return {**columns.carried("instance_id", "repo"), "eval_type": EVERY_TEST}


def swebench_parser(columns: RowColumns, reading: Reading, name: str, column: str = "log_parser") -> str:
    """The name of a parser of swebench 5, as it is. Raises: DatasetInvalid: there is none of that name."""
    asked = {"log_parser": name, "image": "", "eval_script": "", "eval_type": EVERY_TEST}
    described(columns, reading, JudgeName.SWEBENCH_5, asked, column)
    return name


def library_text(answer: Mapping[str, Any], key: str) -> str:
    """A text that the library said, empty when it has nothing to say."""
    value = answer.get(key) or ""
    if not isinstance(value, str):
        raise TypeError(f"expected text of the grading library below {key!r}; found {type(value).__name__}")
    return value


# A row's own parser is a program. It never runs on a host: it runs in the task's container, after the tests, and what
# it found is the last thing that the command prints, which `app.grading.reports` reads.


def written(path: str, content: str) -> str:
    """The command that writes a file, whatever is in it."""
    end = f"END_{hashlib.sha256(content.encode('utf-8', 'replace')).hexdigest()[:24]}"
    line = "" if content.endswith("\n") else "\n"
    return f"cat >{path} <<'{end}'\n{content}{line}{end}"


def printed(path: str) -> str:
    """The command that prints a report, and leaves with the code that the one before left with."""
    return f"code=$?\necho\necho '{TESTS_AS_JSON}'\ncat {path}\nexit $code"
