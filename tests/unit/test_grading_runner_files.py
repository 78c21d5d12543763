"""Which files of a repository are the test runner's, and what a patch says that reaches into it."""

from __future__ import annotations

import pytest

from app.grading.patch_words import (
    added_hooks,
    changed_assertion,
    file_changes,
    hidden_words,
    leavings,
    names_repository,
    reaches_runner,
    reads_tests,
)
from app.grading.runner_files import base_sections, displaced_by, folders_of_tests, shadows, steers


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "a/b/conftest.py",
        "pytest.ini",
        "tox.ini",
        "x.pth",
        "sitecustomize.py",
        "mine-1.dist-info/entry_points.txt",
        "usercustomize/__init__.py",
        "pkg/sitecustomize.cpython-311.so",
    ],
)
def test_files_that_only_a_runner_reads_steer_it(path: str) -> None:
    assert steers(path)


@pytest.mark.parametrize("path", ["setup.py", "tests/test_conftest.py", "src/pkg/core.py", "tests/data/setup.cfg"])
def test_other_files_do_not(path: str) -> None:
    assert not steers(path)


@pytest.mark.parametrize(
    "path",
    [
        *("pytest.py", "json.py", "unittest/__init__.py", "_pytest/runner.py", "tests/pluggy.py", "src/_pytest/x.py"),
        *("argparse/__init__.pyc", "json/__init__.cpython-311-x86_64-linux-gnu.so", "lib/queue.pyc"),
    ],
)
def test_new_modules_with_names_of_the_runner_or_the_library_shadow_it(path: str) -> None:
    assert shadows(path, [])


def test_modules_of_a_package_have_longer_names() -> None:
    assert not shadows("src/pkg/json.py", ["src/pkg"])
    assert not shadows("src/pkg/thing.py", [])
    assert not shadows("docs/json.rst", [])
    assert not shadows("tests/sub/json.py", ["tests/sub"])


FOLDERS = folders_of_tests(["pkg/sub/tests/deep/test_a.py", "pkg/test_b.py"])


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("tests/test_words/__init__.py", {"tests/test_words.py", "tests/test_words"}),
        (
            "tests/test_words.cpython-311.so",
            {"tests/test_words.py", "tests/test_words/__init__.py", "tests/test_words"},
        ),
        ("tests/test_words", {"tests/test_words.py", "tests/test_words/__init__.py"}),
        ("tests/__init__.py", {"tests", "tests.py"}),
        ("tests.py", {"tests", "tests/__init__.py"}),
        ("pkg/sub/tests/deep/__init__.py", {"pkg/sub/tests/deep", "pkg/sub/tests/deep.py"}),
        ("pkg/sub/__init__.py", set()),
        ("pkg/core/__init__.py", set()),
        ("pkg/tests.py", set()),
        ("tests/.a.py", {"tests/.a.py.py", "tests/.a.py/__init__.py"}),
    ],
)
def test_what_would_be_displaced_by_tests_is_told(path: str, names: set[str]) -> None:
    assert set(displaced_by(path, FOLDERS)) == names


@pytest.mark.parametrize("path", ["tests/.a.py", "tools/queue.py", "pkg/sub/types.py", "scripts/platform.py"])
def test_folders_that_no_run_of_tests_imports_from_shadow_nothing(path: str) -> None:
    assert not shadows(path, [])


SETUP = "[metadata]\nname = x\n\n[tool:pytest]\naddopts = -q\n"
TOML = '[project]\nname = "x"\n\n[tool.pytest.ini_options]\naddopts = "-q"\n'


@pytest.mark.parametrize(
    ("name", "base", "now"),
    [
        ("setup.cfg", SETUP, SETUP.replace("-q", "-p evil")),
        ("setup.cfg", "[metadata]\nname = x\n", SETUP),
        ("setup.cfg", SETUP, "[metadata]\nname = x\n"),
        ("pyproject.toml", TOML, TOML.replace("-q", "-p evil")),
        ("pyproject.toml", TOML, 'tool.pytest.ini_options.addopts = "-p evil"\n[project]\nname = "x"\n'),
        ("pyproject.toml", TOML, '[project]\nname = "x"\n[tool]\npytest = {ini_options = {addopts = "-p evil"}}\n'),
        ("pyproject.toml", TOML, "not [ toml"),
        ("setup.cfg", SETUP, f"{SETUP}[x]\r[tool:pytest]\raddopts = -p evil\r"),
        ("setup.cfg", "", "[metadata]\nname = x\r[tool:pytest]\raddopts = -p evil\r"),
        ("pyproject.toml", "", '[project]\nname = "x"\r[tool.pytest.ini_options]\raddopts = "-p evil"\r'),
        (
            "pyproject.toml",
            '[project]\nname="x"\n',
            '[project]\nname="x"\n[project.entry-points.pytest11]\ne = "evil"\n',
        ),
    ],
)
def test_the_runners_sections_are_as_in_the_base(name: str, base: str, now: str) -> None:
    restored = base_sections(name, base, now)
    assert "evil" not in restored
    assert ("addopts" in restored) == ("addopts" in base)


def test_other_sections_stay_as_the_submission_wrote_them() -> None:
    now = TOML.replace('name = "x"', 'name = "x"\ndependencies = ["y"]')
    assert base_sections("pyproject.toml", TOML, now) == now
    changed = SETUP.replace("name = x", "name = y")
    assert base_sections("setup.cfg", SETUP, changed) == changed
    windows = changed.replace("\n", "\r\n")
    assert base_sections("setup.cfg", SETUP.replace("\n", "\r\n"), windows) == windows


def patch(path: str, *added: str, removed: str = "") -> str:
    lines = "".join(f"+{line}\n" for line in added) + (f"-{removed}\n" if removed else "")
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n{lines}"


@pytest.mark.parametrize(
    "line",
    [
        "import _pytest.runner",
        "return 2 if 'two' in os.environ.get('PYTEST_CURRENT_TEST', '') else 1",
        "def pytest_runtest_makereport(item): ...",
        "os._exit(0)",
        'print("PASSED tests/test_x.py::test_y")',
        "sys.modules['unittest'] = fake",
        "for one in gc.get_objects():",
        "found.test_add.__code__ = (lambda: None).__code__",
        "open('/proc/1/fd/1', 'w')",
        "def pytest_pyfunc_call(pyfuncitem): return True",
        "import_module('_py' + 'test.python').Function.runtest = lambda self: None",
        "exec(base64.b64decode(words))",
        '++ start(__import__("_pytest.runner"))',
        "from _\uff50ytest import runner",
        "# -*- coding: utf-7 -*-",
        "x = 1\r# vim: set fileencoding=utf_16_le :",
        "pytest.xfail('not supported')",
        "pytest.skip('x', allow_module_level=True)",
        "from pytest import raises, skip",
        "raise unittest.SkipTest",
        "self.skipTest('no')",
        "os.execv(sys.executable, words)",
        "os.kill(os.getpid(), 9)",
        "unittest.TestCase.assertEqual = lambda *a: None",
        "print('PASSED', name)",
        'out = "".join("%s %s" % ("PASSED", name) for name in names)',
        "unittest.TestCase._callTestMethod = lambda self, method: None",
        "pytest.Function.obj = property(lambda self: print)",
        "setattr(pytest.Function, 'obj', print)",
        *("import pytest", "import os, unittest.case", "unittest.TestCase.assertEqual == other", "@pytest.mark.skip"),
        "from unittest import mock",
        *("import pluggy", "__import__('pytest').xfail('later')", "raise import_module('pytest').xfail.Exception"),
        *("sys.meta_path.insert(0, Finder)", "sys.setprofile(look)", "ast.parse = parse", "os.dup2(one, two)"),
        *(
            "for m in list(sys.modules.values()):",
            "any(x for m in sys.modules for x in m)",
            "__import__('_py' + 'test')",
        ),
        """kind = getattr(m, "Test" + "Report", None)""",
        *("raise _ShouldStop", "TextTestResult.addFailure = print", "_Outcome.testPartExecutor = quiet"),
    ],
)
def test_words_that_reach_into_the_test_run_are_found(line: str) -> None:
    assert reaches_runner(patch("pkg/a.py", line), "")
    assert not reaches_runner(patch("pkg/a.py", line), patch("pkg/a.py", line)), "the gold solution does it, too"
    assert not reaches_runner(patch("pkg/a.py", line, removed=line), ""), "the program did it before"


@pytest.mark.parametrize(
    "line",
    [
        *("return 42", "self.passed = True", "# the test passed", "raise SystemExit(1)", "exit(0)", "ast.x == 1"),
        *("# import pytest", "read('pytest.ini')", "tests_require = ['pytest', 'unittest2']", "os.dupe(1)"),
        *("words = b64decode(text)", "# -*- coding: utf-8 -*-", "# Transfer-Encoding: chunked", "# coding: latin-1"),
        'PASSED = "PASSED"',
        *("sys.modules.get(name)", "'a' + 'b' + name", '"Test" + " Report"'),
        *("same = a.__code__ == b.__code__", "name = call.__code__.co_name"),
    ],
)
def test_ordinary_lines_are_not(line: str) -> None:
    assert not reaches_runner(patch("pkg/a.py", line), "")


@pytest.mark.parametrize(
    "lines",
    [
        ("from pytest import (", "    raises,  # (all)", "    xfail,", ")"),
        ("from pytest import \\", "    xfail"),
        ("import pytest as t", "t.xfail('later')"),
        ("from pytest import *", "xfail('later')"),
        ("from pytest import Function as F", "F.obj = property(print)"),
        ("import os as o", "o._exit(0)"),
        ("# gc as os", "os.kill(1, 9)"),
        ("from unittest import TestCase as Case", "Case.run = print"),
    ],
)
def test_words_are_found_under_the_names_that_imports_give_them(lines: tuple[str, ...]) -> None:
    assert reaches_runner(patch("pkg/a.py", *lines), "")
    assert not reaches_runner(patch("pkg/a.py", *lines), patch("pkg/b.py", *lines)), "the gold solution does it, too"


def test_other_imports_of_the_same_modules_are_ordinary() -> None:
    lines = ("from os import path as p, environ", "import sys as s", "import inspect as i", "p.exit, s.skip(1)")
    assert not reaches_runner(patch("pkg/a.py", *lines), "")


def test_a_test_runner_is_used_by_tests_and_by_scripts_that_the_program_does_not_name() -> None:
    script = patch("reproduce.py", "import pytest")
    aside = [patch("pkg/testing/case.py", "import pytest"), script.replace("--- a/reproduce.py", "--- /dev/null")]
    aside += [patch("tests/test_a.py", "import unittest"), patch("pkg/conftest.py", "import pytest")]
    aside += [patch("test_fix.py", "unittest.TextTestRunner(verbosity=2).run(suite)", "sys.meta_path.remove(one)")]
    for one in aside:
        assert not reaches_runner(one, ""), one
    used = patch("pkg/a.py", "from pkg.testing import case", "import reproduce")
    for one in aside[:2]:
        assert reaches_runner(one + used, ""), one
    assert reaches_runner(script, ""), "a file of the program"


def test_a_folder_of_tests_inside_a_package_may_be_the_programs() -> None:
    for path in ("pkg/testing/case.py", "pkg/tests/__init__.py", "src/test/x.py"):
        assert reaches_runner(patch(path, "pytest.xfail('later')"), "")
    gone = patch("pkg/tests/helpers.py", removed="pytest.xfail('later')").replace("+1 @@", "+0,0 @@")
    assert reaches_runner(gone + patch("pkg/core.py", "pytest.xfail('later')"), "")
    assert not reaches_runner(gone + patch("tests/helpers.py", "pytest.xfail('later')"), "")


@pytest.mark.parametrize(
    ("path", "line"),
    [("pkg/test_evil.py", "    test_evil,"), ("tests/evil.py", "from tests.evil import double")],
)
def test_a_test_that_the_program_imports_is_no_test(path: str, line: str) -> None:
    ends = patch(path, "pytest.xfail('later')")
    assert reaches_runner(ends + patch("pkg/core.py", line), "")
    assert not reaches_runner(ends + patch("pkg/core.py", "# as tests/test_evil.py says"), "")


def test_hooks_are_found_in_one_file() -> None:
    hook = patch("conftest.py", "def pytest_collection_modifyitems(items):")
    assert added_hooks(hook + patch("b.py", "x = 1"), "conftest.py")
    assert not added_hooks(hook + patch("b.py", "x = 1"), "b.py")
    assert not added_hooks(patch("conftest.py", "import sys"), "conftest.py")


@pytest.mark.parametrize("path", ["tests/helpers.py", "testing/case.py", "pkg/test_a.py", "a_test.py", "notes.rst"])
def test_tests_may_skip_themselves_and_end_processes(path: str) -> None:
    assert not reaches_runner(patch(path, "pytest.skip('here')", "os.kill(child, 9)"), "")
    assert reaches_runner(patch(path, "import _pytest.runner"), "")
    other_name = patch(path, "pytest.skip('here')").replace(f"+++ b/{path}", "+++ z/pkg/core.py")
    assert reaches_runner(other_name, ""), "a header of two names is no test's"


def test_prose_is_not_read_and_a_programs_own_log_and_end_are_not_the_test_runs() -> None:
    prose = patch("CHANGES.md", "Fix the Test Output parser.", "Run `pytest`; PASSED is good.", "import _pytest")
    program = patch("pkg/core.py", "atexit.register(_cache.clear)", 'logging.info("PASSED on %s", n)')
    assert not reaches_runner(prose + program, "")
    for line in ('say(f"PASSED {name}")', 'say("PASSED %s" % name)', 'say("PASSED tests/test_a.py::test_b")'):
        assert reaches_runner(patch("pkg/core.py", line), "")
    assert reaches_runner(prose.replace("+++ b/CHANGES.md", "+++ b/pkg/core.py"), "")


def test_only_a_line_that_moves_whole_was_the_programs_own() -> None:
    line = "from _pytest import runner"
    gone = patch("pkg/old.py", removed=f"    {line}").replace("+1 @@", "+0,0 @@")
    assert not reaches_runner(gone + patch("pkg/a.py", line), "")
    assert reaches_runner(gone + patch("pkg/a.py", f"{line} as r"), "")
    gone_test = gone.replace("pkg/old.py", "tests/test_old.py")
    assert reaches_runner(gone_test + patch("pkg/a.py", line), "")
    assert not reaches_runner(gone_test + patch("tests/test_new.py", line), "")


def test_hunks_are_read_by_their_counts() -> None:
    text = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- a/y\n+++ b/y\n same\n@@ -9 +9,0 @@\n-gone\n"
    text += "--- a/z\n+++ b/z\n@@ -0,0 +1 @@\n+z"
    first, second = file_changes(text)
    assert (first.path, first.added, first.removed) == ("x", ["++ b/y"], ["-- a/y", "gone"])
    assert (second.path, second.added, second.removed) == ("z", ["z"], [])
    assert not names_repository(f'--- "a/\\x\n+++ b/x\n@@ -1,{"9" * 5000} +1 @@\n'), "no text breaks it"
    assert file_changes("@@ -1 +1,0 @@\n-a\n+b\n+++ c")[0].added == ["b", "++ c"], "what no hunk holds counts"


def test_what_hides_words_is_found() -> None:
    binary = "diff --git a/{0} b/{0}\nindex 1..2 100644\nGIT binary patch\nliteral 2\nzcmX\n\n"
    assert "pkg/core.py" in hidden_words(binary.format("pkg/core.py"), "")
    assert "pkg/core.py" in hidden_words(binary.format("pkg/core.py"), patch("pkg/core.py", "the gold is text"))
    assert not hidden_words(binary.format("pkg/core.py"), binary.format("pkg/core.py"))
    assert not hidden_words(binary.format("image.png"), "")
    for line in ("*.py binary", "* -diff", "pkg/core.py binary", "[attr]mine binary"):
        assert "gitattributes" in hidden_words(patch("pkg/.gitattributes", line), "")
    assert not hidden_words(patch(".gitattributes", "*.png binary", "*.py text", "*.sh -text"), "")
    ends = patch("setup.cfg", "[x]\r[tool:pytest]\r")
    assert "carriage return in setup.cfg" in hidden_words(ends, patch("setup.cfg", "y = 1"))
    assert not hidden_words(patch("setup.cfg", "y = 1\r"), patch("setup.cfg", "y = 1"))


@pytest.mark.parametrize("name", ["b/tests/new/.git/HEAD", '"b/tests/new/\\056git/HEAD"', "z/.GIT/config\t2026"])
def test_a_patch_that_names_a_repositorys_own_files_is_known(name: str) -> None:
    assert names_repository(f"--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n")
    assert not names_repository(patch(".gitignore", "++ b/x/.git/HEAD", "--- a/.git/x") + patch(".github/a.yml", "x"))


def test_virtual_environments_that_are_left_are_no_part_of_the_program() -> None:
    brought = [".venv/pyvenv.cfg", ".venv/lib/python3.11/site-packages/a.py", "x/site-packages/b.py", "pkg/core.py"]
    left = "".join(patch(path, "import _pytest") for path in brought)
    assert leavings(left, "") == [".venv", "x/site-packages"]
    assert leavings(left, patch(".venv/x", "")) == ["x/site-packages"]
    assert reaches_runner(left, "", leavings(left, "")) == "_pytest"
    assert not reaches_runner("".join(patch(path, "import _pytest") for path in brought[:3]), "", leavings(left, ""))


HIDDEN = ["tests/test_words.py", "test/words.test.js", "tests/data.py"]


@pytest.mark.parametrize(
    ("path", "line", "word"),
    [
        ("words.py", 'answers = open("test_words.py").read()', "test_words.py"),
        ("words.py", "for one in glob('**/test_*.py'): ast.walk(one)", "test_*"),
        ("words.js", "fs.readFileSync(__dirname + '/test/words.test.js')", "words.test.js"),
        ("words.ts", 'glob("*.test.js")', "*.test."),
    ],
)
def test_a_program_that_names_hidden_tests_could_read_their_answers(path: str, line: str, word: str) -> None:
    assert word in reads_tests(patch(path, line), "", HIDDEN)
    assert not reads_tests(patch(path, line), patch(path, line), HIDDEN), "the gold solution does it, too"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("README.md", "Run tests/test_words.py."),
        ("tests/test_words.py", "# test_words.py"),
        ("words.py", 'open("data.py")'),
        ("words.py", "test_words = 1"),
    ],
)
def test_other_places_may_name_them(path: str, line: str) -> None:
    assert not reads_tests(patch(path, line), "", HIDDEN)


def hunk(path: str, head: str, *lines: str) -> str:
    counts = [sum(line[0] in signs for line in lines) for signs in (" -", " +")]
    body = "\n".join(lines)
    return (
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,{counts[0]} +1,{counts[1]} @@{head}\n{body}\n"
    )


ASSERTION = "assert_same in pkg/testing.py"


@pytest.mark.parametrize(
    ("head", "lines", "found"),
    [
        ("", [" def assert_same(a, b):", "+    return", "     raise AssertionError"], ASSERTION),
        (" def assert_same(a, b):", ["-    raise AssertionError", "+    pass"], ASSERTION),
        ("", ["-def assert_same(a, b):", "+def assert_same(a, b, c):", "     pass"], ASSERTION),
        ("", [" def assert_same(", "     a, b", " ):", "+    return", "     raise AssertionError"], ASSERTION),
        ("", [" def assert_same(a, b):", "     pass", " ", "+def assert_more(a):", "+    pass"], ""),
        ("", [" def assert_same(a, b):", "     pass", " ", "-LIMIT = 1", "+LIMIT = 2"], ""),
        (" def same(a, b):", ["-    return a is b", "+    return a == b"], ""),
    ],
)
def test_an_assertion_that_is_changed_outside_of_tests_is_found(head: str, lines: list[str], found: str) -> None:
    patch = hunk("pkg/testing.py", head, *lines)
    assert changed_assertion(patch, "", []) == found
    assert changed_assertion(patch, patch, []) == "", "the gold does the same"
    assert changed_assertion(patch, "", ["pkg/testing.py"]) == "", "the hidden tests bring it"
    assert changed_assertion(patch.replace("pkg/testing.py", "pkg/tests/test_x.py"), "", []) == ""


@pytest.mark.parametrize("line", ["case.assertTrue = skip", 'setattr(case, "assertTrue", skip)'])
def test_an_assertion_that_is_replaced_is_found(line: str) -> None:
    assert reaches_runner(hunk("pkg/core.py", "", f"+{line}"), "")
