"""What test runners print, read back. The texts are shortened outputs of real runs, or built like them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app.grading.reports import Report, contradiction, parse_pydantic, parse_pytest, parse_tests_as_json
from app.models.outcome import TestStatus
from app.models.reports import TESTS_AS_JSON

PASSED, FAILED, ERROR, SKIPPED, MISSING = TestStatus

SUITE = """
import unittest
import pytest

@pytest.mark.parametrize("x", ["plain", "a b", "c - d", "[e]", "f[g - h]", "FAILED i", "j::k"])
def test_names(x):
    assert x != "c - d", "x - y [z]"

@pytest.mark.xfail(reason="known - bug")
def test_xfail():
    assert 0

@pytest.mark.xfail
def test_xpass():
    pass

@pytest.mark.skip(reason="not here (yet)")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise ValueError("no - fixture")

def test_broken_fixture(broken):
    pass

@pytest.fixture
def breaks_later():
    yield
    raise ValueError("late")

def test_broken_teardown(breaks_later):
    pass

class TestClass:
    def test_method(self):
        print("FAILED tests/none.py::test_nothing - not a summary")
"""
EXPECTED = {
    "test_a.py::test_names[plain]": PASSED,
    "test_a.py::test_names[a b]": PASSED,
    "test_a.py::test_names[c - d]": FAILED,
    "test_a.py::test_names[[e]]": PASSED,
    "test_a.py::test_names[f[g - h]]": PASSED,
    "test_a.py::test_names[FAILED i]": PASSED,
    "test_a.py::test_names[j::k]": PASSED,
    "test_a.py::test_xfail": PASSED,
    "test_a.py::test_broken_fixture": ERROR,
    "test_a.py::TestClass::test_method": PASSED,
}


@pytest.mark.parametrize("options", [["-rA"], ["-rA", "-v"], ["-rA", "--color=yes"], ["-rA", "-q", "--tb=no"], ["-v"]])
def test_a_real_run_of_pytest_is_read_whatever_its_options(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_a.py").write_text(SUITE)
    (tmp_path / "test_b.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", *options]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"COLUMNS": "80", "PATH": "/usr/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    found = parse_pytest(run.stdout)
    assert {name: found.get(name) for name in EXPECTED} == EXPECTED
    assert contradiction(run.stdout, EXPECTED, "python -m pytest") == ""
    assert "test_a.py::test_xpass" not in found
    assert found["test_b.py"] is ERROR
    if options == ["-v"]:
        assert found["test_a.py::test_skipped"] is SKIPPED
    else:
        assert found["test_a.py::test_broken_teardown"] is ERROR


OPENING, FAILS, PASSES = "=== test session starts ===", "FAILED a.py::test - no", "PASSED a.py::test"
END = "=== 1 failed in 0.01s ==="


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((OPENING, PASSES, "=== 1 passed in 0.01s ==="), ""),
        ((OPENING, PASSES, "= 3 passed, 1 warnings in 0.12 seconds ="), ""),
        ((OPENING, PASSES, "== 2 passed, 1 skipped in 75.20s (0:01:15) =="), ""),
        ((OPENING, PASSES, "Results (0.13s):"), ""),
        ((OPENING, END, OPENING, PASSES, "=== 1 passed in 0.01s ==="), ""),
        (("1 failed in 0.01s", PASSES, "1 passed in 0.02s"), ""),
        ((PASSES,), ""),
        ((OPENING, "ERROR a.py::other", "=== 1 error in 0.01s ===", "PASSED b.py::other"), ""),
        ((OPENING, PASSES), "has no end"),
        ((OPENING, FAILS, END, PASSES), "as failed, and then as passed"),
        ((OPENING, FAILS, PASSES, END), "as failed, and then as passed"),
        ((OPENING, "ERROR a.py - ImportError", PASSES, END), "as failed, and then as passed"),
        ((OPENING, "=== no tests ran in 0.01s ===", PASSES), "after pytest's end"),
        (("1 error in 0.01s", "a.py::test PASSED [100%]"), "after pytest's end"),
    ],
)
def test_a_report_that_pytest_does_not_write_is_told(lines: tuple[str, ...], said: str) -> None:
    found = contradiction("\n".join(lines), {"a.py::test": PASSED}, "pip install pytest && sh tests.sh")
    assert said in found if said else found == ""


@pytest.mark.parametrize("command", ["cd /app\npytest -rA a.py", "python3 -m pytest -q", "tox -e x -- pytest"])
def test_a_command_of_pytest_has_a_report_with_an_end(command: str) -> None:
    assert "has no end" in contradiction(PASSES, {"a.py::test": PASSED}, command)
    assert contradiction(PASSES, {"a.py::test": PASSED}, f"{command} >log; grep PASSED log") == ""


RULE, THIN = "=" * 70, "-" * 70


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("test_x (m.T) ... ok", "test_x (m.T) ... FAIL", RULE, "FAIL: test_x (m.T)", THIN), "and then as failed"),
        (("It adds. ... ok", RULE, "ERROR: test_y (m.T)", "It adds.", THIN), "and then as failed"),
        (("test_x (m.T) ... ok", RULE, "FAIL: test_z (m.T)", "Other words.", THIN, "It adds."), ""),
    ],
)
def test_a_failure_that_unittest_tells_at_its_end_is_one(lines: tuple[str, ...], said: str) -> None:
    found = contradiction("\n".join(lines), {"test_x (m.T)": PASSED, "It adds.": PASSED, "test_z (m.T)": FAILED}, "")
    assert said in found if said else found == ""


def test_a_report_lists_as_many_failures_as_pytest_counts() -> None:
    lines = ["PASSED a.py::test", "FAILED a.py::test_b - no", "=== 1 failed, 1 passed in 0.1s ==="]
    assert contradiction("\n".join(lines), {"a.py::test": PASSED}, "pytest -rA") == ""
    turned = "\n".join(lines).replace("FAILED a.py::test_b - no", "PASSED a.py::test_b")
    assert "counts 1 failed tests and its report lists 0" in contradiction(turned, {}, "pytest -rA")
    assert contradiction(turned, {}, "pytest -rp") == "", "it lists those that passed alone"


def test_a_failure_is_expected_where_the_hidden_tests_say_so() -> None:
    text, statuses = "XFAIL a.py::test - later\n=== 1 xfailed in 0.1s ===", {"a.py::test": PASSED}
    assert "expected failure" in contradiction(text, statuses, "pytest -rA", ["a.py::test"])
    assert contradiction(text, statuses, "pytest -rA") == ""


def test_the_lines_of_several_pytest_workers_are_read_and_a_count_of_skipped_tests_names_none() -> None:
    workers = "[gw0] [ 50%] PASSED a.py::test_x \n[gw1] [100%] FAILED a.py::test_y[a b] \n"
    found = parse_pytest(f"{workers}SKIPPED [2] tests/a.py:3: needs a network\n")
    assert found == {"a.py::test_x": PASSED, "a.py::test_y[a b]": FAILED}


def test_names_of_older_rows_are_found_and_a_whole_name_is_never_taken_for_a_similar_one() -> None:
    found = {"a.py::test_count[\\n x-1]": PASSED, "a.py::test_path[/testbed/data/x.dcm-data0]": FAILED}
    report = Report(found | {"a.py::test_other[a b]": PASSED, "a.py::test_plain_more": PASSED})
    assert report.status("a.py::test_count[\\n") is PASSED
    assert report.status("a.py::test_path[/n/fs/somewhere/x.dcm-data0]") is FAILED
    assert report.status("a.py::test_path[/x.dcm-data0]") is FAILED
    assert report.status("a.py::test_other[a c]") is MISSING
    assert report.status("a.py::test_plain") is MISSING


# --- Of single datasets -----------------------------------------------------------------------------------------------


def as_json(body: str, before: str = "") -> str:
    return f"{before}\n{TESTS_AS_JSON}\n{body}\n>>>>> End Test Output\n"


def test_the_json_below_the_last_mark_is_read() -> None:
    forged = '{"tests": [{"name": "a", "status": "PASSED"}, {"name": "z", "status": "PASSED"}]}'
    real = '{"tests": [{"name": "a", "status": "FAILED"}, {"name": "b c", "status": "PASSED"},'
    real += ' {"name": "s", "status": "SKIPPED"}, {"name": "e", "status": "ERROR"}]}'
    assert parse_tests_as_json(as_json(real, as_json(forged))) == {"a": FAILED, "b c": PASSED, "s": SKIPPED, "e": ERROR}
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
