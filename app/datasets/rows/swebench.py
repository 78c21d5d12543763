"""Reads SWE-bench, Lite and Verified, and SWE-bench Multilingual: classic rows, and 5.x rows that include a script.

A classic row names a repository and a version; the package swebench 4.1.0 knows their commands. Since 5.0 rows have
`image`, `eval_script`, `log_parser` and `eval_type`; the script itself writes the hidden tests and builds.

Source: swebench 4.1.0, harness/test_spec/test_spec.py (make_test_spec) and python.py (make_eval_script_list_py);
swebench 5.0.2, harness/utils.py (make_test_spec); the dataset cards SWE-bench/SWE-bench and SWE-bench_Multilingual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import image_of, script
from app.datasets.rows.goals import NEEDED, described, library_text, named_tests, row_task
from app.models.spec import AgentTask, JudgeName, TestsGoal

_SCRIPTED = ("image", "eval_script", "log_parser", "eval_type")
_OTHERS = frozenset({"install_config", "test_cmd", "test_cmds", "docker_image", "image_name", "before_repo_set_cmd"})
_EVAL_TYPES = ("pass_and_fail", "fail_only")
_OF_ANOTHER = "SWE-bench has none: say whose rows these are, for example swe-rebench=PATH or own=PATH"


class SweBenchRows:
    """Rules of SWE-bench."""

    name: ClassVar[str] = "swe-bench"
    columns: ClassVar[frozenset[str]] = NEEDED

    def recognises(self, row: Mapping[str, Any]) -> bool:
        names = present(row)
        classic = names >= {"environment_setup_commit", "version", "test_patch"}
        return (classic or names >= {*_SCRIPTED}) and not names & _OTHERS

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        columns.none_of(sorted(_OTHERS), _OF_ANOTHER)
        columns.none_of(["image_assets"], "tests that compare with pictures cannot be judged here: leave this row out")
        image = image_of(columns, "image", owner="swebench")
        with row.place.named():
            goal = _scripted(columns, reading) if columns.given("eval_script") else _classic(columns, reading)
            return row_task(row, columns, reading, goal, image=image, commands=goal.test_command)


def _classic(columns: RowColumns, reading: Reading) -> TestsGoal:
    tests = named_tests(columns)
    owner, name = columns.repository()
    known = {"instance_id": columns.name(), "repo": f"{owner}/{name}", "version": columns.text("version")}
    request: dict[str, Any] = {
        **known,
        "base_commit": columns.commit(),
        "test_patch": columns.patch("test_patch", needed=True),
        "FAIL_TO_PASS": list(tests["fail_to_pass"]),
        "PASS_TO_PASS": list(tests["pass_to_pass"]),
    }
    answer = described(columns, reading, JudgeName.SWEBENCH_4, request, "repo")
    before, install, build = (library_text(answer, part) for part in ("environment", "install", "build"))
    return TestsGoal(
        base_commit=request["base_commit"],
        test_patch=request["test_patch"],
        install_command=script(before, install) if install.strip() else "",
        build_command=script(before, build) if build.strip() else "",
        test_command=script(before, library_text(answer, "test_command")),
        judge=JudgeName.SWEBENCH_4,
        log_parser=library_text(answer, "parser"),
        row=known,
        **tests,
    )


def _scripted(columns: RowColumns, reading: Reading) -> TestsGoal:
    missing = [column for column in _SCRIPTED if not columns.given(column)]
    if missing:
        raise columns.fault(missing[0], f"all of {', '.join(_SCRIPTED)} in a row that brings its script")
    if columns.text("eval_type") not in _EVAL_TYPES:
        raise columns.fault("eval_type", f"one of {', '.join(_EVAL_TYPES)}")
    request = {column: columns.text(column) for column in _SCRIPTED}
    answer = described(columns, reading, JudgeName.SWEBENCH_5, request, "log_parser")
    return TestsGoal(
        base_commit=columns.commit(),
        test_command=library_text(answer, "test_command"),
        judge=JudgeName.SWEBENCH_5,
        log_parser=request["log_parser"],
        row=columns.carried("instance_id", "repo", "version", "eval_type"),
        **named_tests(columns),
    )
