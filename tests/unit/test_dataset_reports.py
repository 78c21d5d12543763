"""Reports that only one dataset has."""

from __future__ import annotations

import pytest

from app.grading.dataset_reports import parse_pydantic, parse_tests_as_json
from app.models.outcome import TestStatus
from app.models.reports import TESTS_AS_JSON

PASSED, FAILED, SKIPPED, ERROR = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED, TestStatus.ERROR


def as_json(body: str, before: str = "") -> str:
    return f"{before}\n{TESTS_AS_JSON}\n{body}\n>>>>> End Test Output\n"


def test_the_json_below_the_last_mark_is_read() -> None:
    forged = '{"tests": [{"name": "a", "status": "PASSED"}, {"name": "z", "status": "PASSED"}]}'
    real = '{"tests": [{"name": "a", "status": "FAILED"}, {"name": "b c", "status": "PASSED"},'
    real += ' {"name": "s", "status": "SKIPPED"}, {"name": "e", "status": "ERROR"}]}'
    assert parse_tests_as_json(as_json(real, as_json(forged))) == {"a": FAILED, "b c": PASSED, "s": SKIPPED, "e": ERROR}


def test_a_status_that_is_none_of_the_known_is_a_failure() -> None:
    assert parse_tests_as_json(as_json('{"tests": [{"name": "a", "status": "passed?"}]}')) == {"a": FAILED}


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "7", '{"tests": 1}', '{"tests": [1, {"status": "PASSED"}]}', "[" * 9000]
)
def test_what_is_no_report_names_no_test(body: str) -> None:
    assert parse_tests_as_json(as_json(body)) == {}
    assert parse_tests_as_json('{"tests": [{"name": "a", "status": "PASSED"}]}') == {}  # without the mark


def test_pydantic_s_lines_begin_or_end_with_a_status() -> None:
    report = (
        "tests/test_a.py::test_old PASSED\n"
        "\x1b[32mPASSED\x1b[0m tests/test_a.py::test_new\n"
        "FAILED [ 50%] tests/test_a.py::test_progress - AssertionError: x\n"
        "XFAIL tests/test_a.py::test_expected\n"
        "SKIPPED tests/test_a.py::test_left\n"
        "PASSED\nan output line about nothing\n"
    )
    assert parse_pydantic(report) == {
        "tests/test_a.py::test_old": PASSED,
        "tests/test_a.py::test_new": PASSED,
        "tests/test_a.py::test_progress": FAILED,
        "tests/test_a.py::test_expected": PASSED,
        "tests/test_a.py::test_left": SKIPPED,
    }
