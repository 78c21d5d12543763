"""Adapts swebench 5: rows that include their evaluation script and name their parser. Served by resident.py.

Source: swebench 5.0.2, harness/utils.py (the script), harness/grading.py (the verdict).
"""

from __future__ import annotations

import re
from typing import Any

from resident import RowUnknown, absent, as_file, bare, column

absent("datasets", "tqdm")
bare("swebench", "swebench.harness")

from swebench.harness.constants import (  # noqa: E402
    END_TEST_OUTPUT,
    FAIL_TO_PASS,
    PASS_TO_PASS,
    START_TEST_OUTPUT,
    TEST_EXIT_CODE,
    EvalType,
    ResolvedStatus,
)
from swebench.harness.grading import (  # noqa: E402
    _resolve_case,
    get_eval_tests_report,
    get_logs_eval,
    get_resolution_status,
)
from swebench.harness.log_parsers import PARSER_REGISTRY  # noqa: E402
from swebench.harness.utils import make_test_spec  # noqa: E402
from swebench.types import TestSpec  # noqa: E402

NAME = "swebench"
_LONGEST_NAME = 8192  # characters; a longer one is a test's output, and slow to match
_EVAL_TYPES = [one.value for one in EvalType]


def describe(row: dict[str, Any]) -> dict[str, str]:
    """Returns the row's own script, which writes the hidden tests itself and prints the tests' exit code."""
    column(row, "eval_script")
    column(row, "image")
    spec = make_test_spec({"repo": "", "version": "", "instance_id": "", "FAIL_TO_PASS": [], "PASS_TO_PASS": [], **row})
    return {
        "environment": "",
        "install": "",
        "build": "",
        "test_command": spec.eval_script,
        "parser": _parser(column(row, "log_parser")),
        "eval_type": _eval_type(row).value,
    }


def judge(goal: dict[str, Any], log: str, exit_code: int | None) -> dict[str, Any]:
    """Judges by its own reading of a log file, between the markers of the row's script; without them the whole log."""
    row = goal["row"]
    tests = {FAIL_TO_PASS: goal["fail_to_pass"], PASS_TO_PASS: goal["pass_to_pass"]}
    spec = TestSpec(
        instance_id=str(row.get("instance_id", "")), image="", eval_script_list=[], repo=str(row.get("repo", "")),
        version=str(row.get("version", "")), FAIL_TO_PASS=tests[FAIL_TO_PASS], PASS_TO_PASS=tests[PASS_TO_PASS],
        log_parser=_parser(goal["log_parser"]), eval_type=_eval_type(row).value,
    )  # fmt: skip
    if not (START_TEST_OUTPUT in log and END_TEST_OUTPUT in log):
        exit_line = "" if exit_code is None else f"{TEST_EXIT_CODE}: {exit_code}\n"
        log = f"{START_TEST_OUTPUT}\n{log}\n{END_TEST_OUTPUT}\n{exit_line}"
    with as_file(log) as path:
        results, readable = get_logs_eval(spec, path)
    if not readable:
        return {"resolved": False, "statuses": {}}
    if patterns := row.get("left_out_of_names"):
        results = {_without(name, patterns): status for name, status in results.items()}
    report = get_eval_tests_report(results, tests, eval_type=_eval_type(row))
    passed = {name for kind in tests for name in report[kind]["success"]}
    return {
        "resolved": get_resolution_status(report) == ResolvedStatus.FULL.value,
        "statuses": {
            name: results.get(_resolve_case(name, results)) or ("PASSED" if name in passed else "MISSING")
            for names in tests.values()
            for name in names
        },
    }


def _without(name: str, patterns: list[str]) -> str:
    """Returns the name without the parts that differ from run to run, by the rule of the row's dataset."""
    for pattern in patterns if len(name) <= _LONGEST_NAME else ():
        name = re.sub(pattern, "", name)
    return name.strip()


def _parser(name: str) -> str:
    if name not in PARSER_REGISTRY:
        known = ", ".join(PARSER_REGISTRY)
        raise RowUnknown(f"swebench 5 knows no parser {name!r} (`log_parser`); known: {known}", "log_parser")
    return name


def _eval_type(row: dict[str, Any]) -> EvalType:
    name = column(row, "eval_type")
    if name not in _EVAL_TYPES:
        raise RowUnknown(
            f"swebench 5 knows no rule {name!r} (`eval_type`); known: {', '.join(_EVAL_TYPES)}", "eval_type"
        )
    return EvalType(name)
