"""Which files of a repository are the test runner's, and what a patch says that reaches into it."""

from __future__ import annotations

import pytest

from app.grading.runner_files import added_hooks, base_sections, reaches_runner, shadows, steers


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
    ],
)
def test_files_that_only_a_runner_reads_steer_it(path: str) -> None:
    assert steers(path)


@pytest.mark.parametrize("path", ["setup.py", "tests/test_conftest.py", "src/pkg/core.py", "tests/data/setup.cfg"])
def test_other_files_do_not(path: str) -> None:
    assert not steers(path)


@pytest.mark.parametrize(
    "path", ["pytest.py", "json.py", "unittest/__init__.py", "_pytest/runner.py", "tests/pluggy.py"]
)
def test_new_modules_with_names_of_the_runner_or_the_library_shadow_it(path: str) -> None:
    assert shadows(path, [])


def test_modules_of_a_package_have_longer_names() -> None:
    assert not shadows("src/pkg/json.py", ["src/pkg"])
    assert not shadows("src/pkg/thing.py", [])
    assert not shadows("docs/json.rst", [])


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


def patch(path: str, *added: str, removed: str = "") -> str:
    lines = "".join(f"+{line}\n" for line in added) + (f"-{removed}\n" if removed else "")
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n{lines}"


@pytest.mark.parametrize(
    "line",
    [
        "import _pytest.runner",
        "def pytest_runtest_makereport(item): ...",
        "atexit.register(forge)",
        "os._exit(0)",
        'print("PASSED tests/test_x.py::test_y")',
        "sys.modules['unittest'] = fake",
        "for one in gc.get_objects():",
        "open('/proc/1/fd/1', 'w')",
        "def pytest_pyfunc_call(pyfuncitem): return True",
        "import_module('_py' + 'test.python').Function.runtest = lambda self: None",
        "exec(base64.b64decode(words))",
    ],
)
def test_words_that_reach_into_the_test_run_are_found(line: str) -> None:
    assert reaches_runner(patch("pkg/a.py", line), "")
    assert not reaches_runner(patch("pkg/a.py", line), patch("pkg/a.py", line)), "the gold solution does it, too"
    assert not reaches_runner(patch("pkg/a.py", line, removed=line), ""), "the program did it before"


@pytest.mark.parametrize(
    "line",
    ["return 42", "self.passed = True", "# the test passed", "raise SystemExit(1)", "import pytest", "exit(0)"],
)
def test_ordinary_lines_are_not(line: str) -> None:
    assert not reaches_runner(patch("pkg/a.py", line), "")


def test_hooks_are_found_in_one_file() -> None:
    hook = patch("conftest.py", "def pytest_collection_modifyitems(items):")
    assert added_hooks(hook + patch("b.py", "x = 1"), "conftest.py")
    assert not added_hooks(hook + patch("b.py", "x = 1"), "b.py")
    assert not added_hooks(patch("conftest.py", "import sys"), "conftest.py")
