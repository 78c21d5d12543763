"""What test runners print, read back. The texts are shortened outputs of real runs, or built like them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app.grading.reports import Report, parse_django, parse_pytest, parse_sympy
from app.models.outcome import TestStatus

PASSED, FAILED, ERROR, SKIPPED, MISSING = (
    TestStatus.PASSED,
    TestStatus.FAILED,
    TestStatus.ERROR,
    TestStatus.SKIPPED,
    TestStatus.MISSING,
)

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
    "test_a.py::test_xpass": PASSED,
    "test_a.py::test_broken_fixture": ERROR,
    "test_a.py::TestClass::test_method": PASSED,
}


@pytest.mark.parametrize("options", [["-rA"], ["-rA", "-v"], ["-rA", "--color=yes"], ["-rA", "-q", "--tb=no"], ["-v"]])
def test_a_real_run_of_pytest_is_read_whatever_its_options(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_a.py").write_text(SUITE)
    (tmp_path / "test_b.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", *options]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"COLUMNS": "80", "PATH": "/usr/bin"}
    )
    found = parse_pytest(run.stdout)
    assert {name: found.get(name) for name in EXPECTED} == EXPECTED
    assert found["test_b.py"] is ERROR
    if options == ["-v"]:
        assert found["test_a.py::test_skipped"] is SKIPPED
    else:
        assert found["test_a.py::test_broken_teardown"] is ERROR


def test_the_lines_of_several_pytest_workers_are_read() -> None:
    assert parse_pytest("[gw0] [ 50%] PASSED a.py::test_x \n[gw1] [100%] FAILED a.py::test_y[a b] \n") == {
        "a.py::test_x": PASSED,
        "a.py::test_y[a b]": FAILED,
    }


def test_a_count_of_skipped_tests_names_no_test() -> None:
    assert parse_pytest("SKIPPED [2] tests/a.py:3: needs a network\n") == {}


DJANGO = """Testing against Django installed in '/testbed/django'
Found 7 test(s).
test_plain (queries.tests.Queries1Tests) ... ok
test_named (apps.tests.AppsTests.test_named) ... ok
test_documented (queries.tests.Queries1Tests)
A sitemap index (#2713) ... can be rendered. ... ok
test_wrong (queries.tests.Queries1Tests) ... FAIL
test_broken (queries.tests.Queries1Tests) ... ERROR
test_left_out (queries.tests.Queries1Tests) ... skipped 'Database has feature(s) - x'
test_known (queries.tests.Queries1Tests) ... expected failure
test_printing (queries.tests.Queries1Tests) ... System check identified no issues (0 silenced).
more of it
ok
test_printing_here (queries.tests.Queries1Tests) ... said this ok
test_subtests (queries.tests.Queries1Tests) ... test_after (queries.tests.Queries1Tests) ... ok
======================================================================
FAIL: test_subtests (queries.tests.Queries1Tests) (number=1)
----------------------------------------------------------------------
ERROR: setUpClass (queries.tests.Other)
Ran 7 tests in 0.1s
"""


def test_djangos_runner_is_read() -> None:
    found = parse_django(DJANGO)
    test = "test_{} (queries.tests.Queries1Tests)"
    statuses = {name: found.get(test.format(name)) for name in ("plain", "wrong", "broken", "left_out", "known")}
    assert list(statuses.values()) == [PASSED, FAILED, ERROR, SKIPPED, PASSED]
    assert found["test_named (apps.tests.AppsTests.test_named)"] is PASSED
    assert found["A sitemap index (#2713) ... can be rendered."] is PASSED
    assert found[test.format("printing")] is PASSED
    assert found[test.format("printing_here")] is PASSED
    assert found[test.format("subtests")] is FAILED
    assert found[test.format("after")] is PASSED
    assert found["setUpClass (queries.tests.Other)"] is ERROR


def test_a_real_verbose_run_of_unittest_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_u.py").write_text(
        "import unittest\n"
        "class C(unittest.TestCase):\n"
        "    def test_ok(self): print('hello')\n"
        "    def test_doc(self):\n"
        "        'What it shows.'\n"
        "    def test_fail(self): self.fail()\n"
        "    def test_sub(self):\n"
        "        for i in range(2):\n"
        "            with self.subTest(i=i): self.assertEqual(i, 0)\n"
        "    @unittest.skip('why')\n"
        "    def test_skip(self): pass\n"
    )
    run = subprocess.run([sys.executable, "-m", "unittest", "-v"], cwd=tmp_path, capture_output=True, text=True)
    short = {name.split(" ")[0]: status for name, status in parse_django(run.stderr).items()}
    assert short["test_ok"] is PASSED
    assert short["What"] is PASSED
    assert short["test_fail"] is FAILED
    assert short["test_skip"] is SKIPPED
    assert short["test_sub"] is FAILED


SYMPY = """============================= test process starts ==============================
sympy/matrices/tests/test_sparse.py[5]
test_sparse_matrix ok
test_transpose F
test_trace E
test_known f
test_slow s                                                                 [FAIL]
________________________________________________________________________________
____________ sympy/matrices/tests/test_sparse.py:test_transpose ________________
____________ sympy/matrices/tests/test_sparse.py:test_trace ____________________
"""


def test_sympys_runner_is_read() -> None:
    assert parse_sympy(SYMPY) == {
        "test_sparse_matrix": PASSED,
        "test_transpose": FAILED,
        "test_trace": ERROR,
        "test_known": PASSED,
        "test_slow": SKIPPED,
    }


def test_names_of_older_rows_are_found() -> None:
    report = Report(
        {
            "a.py::test_count[\\n x-1]": PASSED,
            "a.py::test_path[/testbed/data/x.dcm-data0]": FAILED,
            "a.py::test_other[a b]": PASSED,
        }
    )
    assert report.status("a.py::test_count[\\n") is PASSED
    assert report.status("a.py::test_path[/n/fs/somewhere/x.dcm-data0]") is FAILED
    assert report.status("a.py::test_path[/x.dcm-data0]") is FAILED


def test_a_whole_name_is_never_taken_for_a_similar_one() -> None:
    report = Report({"a.py::test_other[a b]": PASSED, "a.py::test_plain_more": PASSED})
    assert report.status("a.py::test_other[a c]") is MISSING
    assert report.status("a.py::test_plain") is MISSING
