"""Adapts multi-swe-bench: rows of Multi-SWE-bench and Multi-SWE-RL. Served by resident.py.

Source: multi-swe-bench 1.1.2, harness/report.py (what a valid report is) and harness/gen_report.py, `gen_eval_reports`
(resolved: valid, and every test that the row's gold patch fixed or kept is among those of its kind).
"""

from __future__ import annotations

from typing import Any

from resident import RowUnknown, bare, column

bare("multi_swe_bench", "multi_swe_bench.harness")

import multi_swe_bench.harness.repos  # noqa: E402, F401  fills the registry
from multi_swe_bench.harness.image import Config  # noqa: E402
from multi_swe_bench.harness.instance import Instance  # noqa: E402
from multi_swe_bench.harness.pull_request import Base, PullRequest  # noqa: E402
from multi_swe_bench.harness.report import generate_report  # noqa: E402
from multi_swe_bench.harness.test_result import TestResult  # noqa: E402

NAME = "multi-swe-bench"
_STATUSES = {"PASS": "PASSED", "FAIL": "FAILED", "SKIP": "SKIPPED"}
_KINDS = ("p2p_tests", "f2p_tests", "s2p_tests", "n2p_tests")
_COUNTS = ("passed", "failed", "skipped")


def describe(row: dict[str, Any]) -> dict[str, str]:
    """Returns the image's script that applies both patches and tests, the image's name, and the parser's name."""
    instance = _instance(row)
    return {
        "environment": "",
        "install": "",
        "build": "",
        "test_command": instance.fix_patch_run(),
        "parser": type(instance).__name__,
        "image": instance.name(),
    }


def judge(goal: dict[str, Any], log: str, exit_code: int | None) -> dict[str, Any]:
    """Judges by the row's results before the fix, and the log of the run with it."""
    del exit_code  # its rule does not use it
    row = goal["row"]
    report = generate_report(_instance(row), _result(row, "run_result"), _result(row, "test_patch_result"), log)
    all_kept = all(set(row.get(kind) or ()) <= set(getattr(report, kind)) for kind in _KINDS)
    fixed = report.fix_patch_result._tests
    return {
        "resolved": bool(report.valid) and all_kept,
        "statuses": {
            name: _STATUSES.get(fixed[name].value, "MISSING") if name in fixed else "MISSING"
            for name in (*goal["fail_to_pass"], *goal["pass_to_pass"])
        },
    }


def _instance(row: dict[str, Any]) -> Instance:
    """Raises: RowUnknown."""
    base = row.get("base") if isinstance(row.get("base"), dict) else {}
    pull_request = PullRequest(
        org=column(row, "org"), repo=column(row, "repo"), number=int(row.get("number", 0)), state="", title="", body="",
        base=Base(label=str(base.get("label", "")), ref=str(base.get("ref", "")), sha=str(base.get("sha", ""))),
        resolved_issues=[], fix_patch="", test_patch="", tag=str(row.get("tag") or ""),
        number_interval=str(row.get("number_interval") or ""), lang=str(row.get("lang") or ""),
    )  # fmt: skip
    try:
        return Instance.create(pull_request, Config(need_clone=False, global_env=None, clear_env=False))
    except ValueError as error:
        raise RowUnknown(
            f"multi-swe-bench knows no such repository (`org`, `repo`, `number_interval`, `tag`): {error}", "repo"
        ) from error


def _result(row: dict[str, Any], name: str) -> TestResult:
    """Raises: RowUnknown."""
    result = row.get(name)
    if not isinstance(result, dict):
        message = f"expected {name!r} in the row to be a result with lists of tests; found {result!r:.100}"
        raise RowUnknown(message, name)
    tests = {f"{kind}_tests": set(result.get(f"{kind}_tests") or ()) for kind in _COUNTS}
    return TestResult(**tests, **{f"{kind}_count": len(tests[f"{kind}_tests"]) for kind in _COUNTS})
