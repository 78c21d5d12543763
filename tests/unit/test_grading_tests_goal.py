"""Grading named tests on a clean checkout: real git, real pytest, in a temporary folder."""

# ruff: noqa: W293 -- an empty line of context is a blank in a patch

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from app.errors import GradingFailed, TestRunnerMissing
from app.grading import grader_for, restore, suite_run
from app.grading.base import Grade, GradingInput
from app.grading.patches import apply_patch, reversed_patch, touched_files
from app.grading.suite_run import TestRun, read_report
from app.grading.tests_goal import TestsGrader, gold_patch
from app.models.outcome import TestStatus
from app.models.shell import CommandResult
from app.models.spec import AgentTask, EnvironmentSpec, JudgeName, Limits, PatchSolution, TestsGoal
from tests.unit.folder_shell import FolderShell, committed, git, new_file

FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef same(a):\n    return a\n",
    "test_calc.py": "from calc import same\n\n\ndef test_same():\n    assert same(1) == 1\n",
}
TEST_PATCH = """diff --git a/test_calc.py b/test_calc.py
--- a/test_calc.py
+++ b/test_calc.py
@@ -1,4 +1,8 @@
-from calc import same
+from calc import add, same
+
+
+def test_add():
+    assert add(1, 2) == 3
 
 
 def test_same():
diff --git a/test_new.py b/test_new.py
new file mode 100644
--- /dev/null
+++ b/test_new.py
@@ -0,0 +1,6 @@
+import pytest
+
+
+@pytest.mark.parametrize("text", ["a b", "c - d"])
+def test_text(text):
+    assert " " in text
"""
GOOD = b"""diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
 
 
 def same(a):
"""
TEXTS = ("test_new.py::test_text[a b]", "test_new.py::test_text[c - d]")
PYTEST = f"{sys.executable} -m pytest -rA -p no:cacheprovider test_calc.py test_new.py"


@pytest.fixture
def shell(tmp_path: Path) -> FolderShell:
    shell = FolderShell(tmp_path)
    committed(shell.path("/testbed"), FILES)
    return shell


NAMED = {"test_patch": "", "fail_to_pass": ("a.py::x",), "pass_to_pass": ("a.py::y",)}


def goal(**changes: Any) -> TestsGoal:
    fields = {
        "base_commit": "HEAD",
        "test_patch": TEST_PATCH,
        "test_command": PYTEST,
        "fail_to_pass": ("test_calc.py::test_add",),
        "pass_to_pass": ("test_calc.py::test_same", *TEXTS),
    }
    return TestsGoal(**{**fields, **changes})


def grade(shell: FolderShell, patch: bytes | None, *, timeout_s: float = 60.0, **changes: Any) -> Grade:
    wanted = goal(**changes)
    task = AgentTask(
        name="t",
        description="d",
        environment=EnvironmentSpec(image="i"),
        goal=wanted,
        limits=Limits(grading_timeout_s=timeout_s),
    )
    return grader_for(wanted).grade(GradingInput(task, patch, None), shell)


@pytest.mark.parametrize("patch", [GOOD, GOOD.replace(b" def same(a):\n", b" def other(a):\n")], ids=["", "shifted"])
def test_a_patch_that_mends_the_bug_gets_reward_1_and_the_whole_report_is_kept(
    shell: FolderShell, patch: bytes
) -> None:
    got = grade(shell, patch)
    assert got.verdict.reward == 1.0
    assert got.verdict.counts
    assert set(got.verdict.tests.values()) == {TestStatus.PASSED}
    assert b"PASSED test_calc.py::test_add" in got.report


@pytest.mark.parametrize("patch", [None, b"", b" \n"])
def test_no_patch_gets_reward_0_for_the_failing_test_alone(shell: FolderShell, patch: bytes | None) -> None:
    got = grade(shell, patch)
    assert got.verdict.reward == 0.0
    assert got.verdict.counts
    assert {name for name, status in got.verdict.tests.items() if status is not TestStatus.PASSED} == {
        "test_calc.py::test_add"
    }
    assert "1 of 4 tests did not pass: test_calc.py::test_add failed" in got.verdict.detail
    assert "none of these names" not in got.verdict.detail


def test_a_patch_that_does_not_apply_is_a_verdict_in_gits_words(shell: FolderShell) -> None:
    got = grade(shell, GOOD.replace(b"return a - b", b"return a * b"))
    assert got.verdict.reward == 0.0
    assert got.verdict.counts
    assert "does not apply" in got.verdict.detail
    assert "calc.py" in got.verdict.detail
    assert git(shell.path("/testbed"), "status", "--porcelain") == ""


def test_what_the_agent_did_to_the_test_files_does_not_count(shell: FolderShell) -> None:
    cheat = b"""diff --git a/test_calc.py b/test_calc.py
--- a/test_calc.py
+++ b/test_calc.py
@@ -1,5 +1,5 @@
 from calc import same
 
 
-def test_same():
-    assert same(1) == 1
+def test_add():
+    assert True
diff --git a/test_new.py b/test_new.py
new file mode 100644
--- /dev/null
+++ b/test_new.py
@@ -0,0 +1 @@
+raise SystemExit(0)
"""
    got = grade(shell, cheat)
    assert got.verdict.tests["test_calc.py::test_add"] is TestStatus.FAILED
    assert got.verdict.tests[TEXTS[0]] is TestStatus.PASSED


def test_code_that_never_ends_is_a_result_and_its_report_is_kept(shell: FolderShell) -> None:
    loop = GOOD.replace(b"+    return a + b", b"+    while True: pass")
    add = f"{sys.executable} -c 'import calc; calc.add(1, 2)'"
    passed = ("test_calc.py::test_add", "test_calc.py::test_same", *TEXTS)
    lines = shlex.quote("".join(f"{name} PASSED\\n" for name in passed))
    got = grade(shell, loop, timeout_s=2.0, test_command=f"printf '%b' {lines}; {add}")
    assert (got.verdict.reward, got.verdict.counts) == (0.0, True)
    assert set(got.verdict.tests.values()) == {TestStatus.PASSED}, "passed tests count only when the command ends"
    assert got.verdict.detail == "tests did not end within 2 s"
    assert b"test_text[a b] PASSED" in got.report


def test_a_patch_that_breaks_the_import_fails_every_test(shell: FolderShell) -> None:
    got = grade(shell, GOOD.replace(b"+    return a + b", b"+    return ("))
    assert got.verdict.reward == 0.0
    assert got.verdict.tests["test_calc.py::test_same"] is TestStatus.MISSING


@pytest.mark.parametrize(("lists", "reward"), [("pass_to_pass", 1.0), ("fail_to_pass", 0.0)])
def test_a_skipped_test_is_fine_only_where_it_passed_before(shell: FolderShell, lists: str, reward: float) -> None:
    command = "echo 'tests/a.py::test_one PASSED'; echo 'tests/a.py::test_two SKIPPED (not here)'"
    names = {"fail_to_pass": ("tests/a.py::test_one",), "pass_to_pass": ("tests/a.py::test_one",)}
    names[lists] = ("tests/a.py::test_two",)
    assert grade(shell, None, test_command=command, **names).verdict.reward == reward


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"test_patch": TEST_PATCH.replace("-from calc", "-from nowhere")}, "expected the row's test_patch to apply"),
        ({"base_commit": "1" * 40}, r"base_commit 1{40}, which is not in .* does not belong to this row"),
        ({"test_command": "no-such-runner -rA"}, "expected the test command to start.*no-such-runner"),
    ],
)
def test_what_does_not_fit_the_image_is_the_graders_failure(
    shell: FolderShell, tmp_path: Path, changes: dict[str, str], why: str
) -> None:
    with pytest.raises(GradingFailed, match=f"(?s){why}") as failed:
        grade(shell, GOOD, **changes)
    assert isinstance(failed.value, TestRunnerMissing) is ("test_command" in changes)
    with pytest.raises(GradingFailed, match="expected a git repository"):
        grade(FolderShell(tmp_path / "other"), None, test_patch="")


def test_one_commit_of_the_images_maker_above_the_base_is_the_rows_state_and_two_are_not(shell: FolderShell) -> None:
    work = shell.path("/testbed")
    base = git(work, "rev-parse", "HEAD").strip()
    git(work, "commit", "-q", "--allow-empty", "-am", "SWE-bench")
    assert grade(shell, GOOD, base_commit=base).verdict.reward == 1.0
    git(work, "checkout", "-q", "--force", ".")
    git(work, "commit", "-q", "--allow-empty", "-am", "and another")
    head = git(work, "rev-parse", "HEAD").strip()
    with pytest.raises(GradingFailed, match=f"found HEAD at {head} and base_commit {base}, which is neither"):
        grade(shell, GOOD, base_commit=base)


def test_what_is_installed_between_patch_and_tests_is_what_the_tests_meet(shell: FolderShell) -> None:
    look = "import sys; sys.path[0] = 'built'; import calc; print(['FAILED', 'PASSED'][calc.add(1, 2) == 3], 'a.py::x')"
    only = {"pass_to_pass": (), "fail_to_pass": ("a.py::x",), "test_command": f'{sys.executable} -c "{look}"'}
    before = {path.name for path in shell.path("/testbed/.git").iterdir()}
    got = grade(shell, GOOD, install_command="mkdir -p built && mv calc.py built/ && echo built it", **only)
    assert {path.name for path in shell.path("/testbed/.git").iterdir()} <= {*before, "ORIG_HEAD", "index"}
    assert got.verdict.reward == 1.0
    assert b"--- install_command: exit code 0 ---\nbuilt it" in got.report


def test_a_failed_install_step_is_told_and_uses_up_the_time_for_grading(shell: FolderShell) -> None:
    got = grade(shell, GOOD, install_command="echo no such index >&2; exit 3")
    assert got.verdict.reward == 1.0, "the tests run all the same"
    assert b"--- install_command: exit code 3 ---\nno such index" in got.report
    git(shell.path("/testbed"), "checkout", "-q", ".")
    got = grade(shell, GOOD, install_command="sleep 60", timeout_s=2.0)
    assert (got.verdict.reward, got.verdict.counts) == (0.0, True)
    assert b"--- install_command: did not end in time ---" in got.report


def test_what_a_build_of_the_hidden_tests_prints_is_not_judged(shell: FolderShell) -> None:
    says = "test -f test_new.py && echo 'PASSED test_calc.py::test_add'"
    got = grade(shell, None, build_command=says)
    assert b"--- build_command: exit code 0 ---\nPASSED test_calc.py::test_add" in got.report
    assert got.verdict.tests["test_calc.py::test_add"] is TestStatus.FAILED
    assert grade(shell, None, test_command=says).verdict.tests["test_calc.py::test_add"] is TestStatus.PASSED


def test_a_rows_own_script_finds_both_patches_where_it_looks_for_them(tmp_path: Path) -> None:
    shell = FolderShell(tmp_path)
    committed(shell.path("/testbed"), FILES)
    script = f"git apply {tmp_path}/home/test.patch {tmp_path}/home/fix.patch && {PYTEST}"
    paths = {"patch_path": "/home/fix.patch", "test_patch_path": "/home/test.patch", "test_command": script}
    assert grade(shell, GOOD, **paths).verdict.reward == 1.0
    git(shell.path("/testbed"), "reset", "-q", "--hard")
    (shell.path("/testbed") / "test_new.py").unlink()
    assert grade(shell, b"not a patch", **paths).verdict.reward == 0.0


def test_printed_markers_do_not_move_what_is_judged(shell: FolderShell) -> None:
    forged = "echo '>>>>> MegaFlow 0 end 0'; echo '>>>>> End Test Output'; echo '>>>>> MegaFlow 0 start'"
    got = grade(shell, None, test_command=f"echo 'FAILED a.py::x'; {forged}; echo 'PASSED a.py::y'", **NAMED)
    assert got.verdict.tests == {"a.py::x": TestStatus.FAILED, "a.py::y": TestStatus.PASSED}


def test_the_marker_is_nowhere_where_a_test_could_read_it(shell: FolderShell) -> None:
    look = "cat /proc/$PPID/cmdline /proc/$PPID/environ /proc/$$/cmdline /proc/$$/environ 2>/dev/null | tr '\\0' '\\n'"
    got = grade(shell, None, test_command=look, **NAMED)
    assert got.report.count(read_report(got.report).nonce.encode()) == 3  # our first line, and the two markers


def test_a_kept_report_gives_the_same_verdict_again(shell: FolderShell) -> None:
    got = grade(shell, None)
    again = TestsGrader(goal()).verdict(read_report(got.report), limit_s=60.0)
    assert again == got.verdict
    with pytest.raises(GradingFailed, match="expected the report of a test run"):
        read_report(b"PASSED a.py::x\n")


def test_a_verdict_says_who_judged_and_gives_partial_credit(shell: FolderShell) -> None:
    two = {"fail_to_pass": ("a.py::x", "a.py::y"), "pass_to_pass": ("a.py::z",)}
    one_mended = grade(shell, None, test_command="echo 'PASSED a.py::x'; echo 'PASSED a.py::z'", **two).verdict
    assert one_mended.grader.startswith("megaflow")
    assert (one_mended.reward, one_mended.metrics["partial"]) == (0.0, 0.5)
    one_broken = grade(shell, None, test_command="echo 'PASSED a.py::x'; echo 'FAILED a.py::z'", **two).verdict
    assert one_broken.metrics == {"tests_passed": 1.0, "tests_total": 3.0, "partial": 0.0}


def test_the_exit_code_judges_where_the_dataset_says_so(shell: FolderShell) -> None:
    told = {**NAMED, "judge": JudgeName.EXIT_CODE}
    got = grade(shell, None, test_command="echo 'FAILED a.py::x'; true", **told).verdict
    assert (got.reward, got.tests["a.py::x"]) == (1.0, TestStatus.FAILED)
    assert got.grader.startswith("exit code")
    assert grade(shell, None, test_command="echo 'PASSED a.py::x'; exit 5", **told).verdict.reward == 0.0
    early = grade(shell, None, test_command="echo collecting", **told).verdict
    assert (early.reward, set(early.tests.values())) == (0.0, {TestStatus.MISSING})
    assert grade(shell, None, test_command="true", log_parser="", **told).verdict.reward == 1.0


class Watched(FolderShell):
    """Its kernel kills for memory while the tests run, and tells the next command."""

    def run(self, command: str, **how: Any) -> CommandResult:
        return dataclasses.replace(super().run(command, **how), out_of_memory=command == "false")


def test_tests_that_are_missing_for_want_of_memory_say_so(tmp_path: Path) -> None:
    shell = Watched(tmp_path)
    committed(shell.path("/testbed"), FILES)
    verdict = grade(shell, GOOD, test_command="kill -9 $$").verdict
    assert (verdict.reward, verdict.counts) == (0.0, True)
    limit_bytes = EnvironmentSpec(image="i", workdir="/testbed").resources.memory_bytes
    assert (
        f"; while the tests ran, processes were killed at the environment's memory limit of {limit_bytes} bytes"
        in verdict.detail
    )
    assert "missing; the report has none of these names" in verdict.detail
    named = grade(shell, None, test_command="echo test_calc.py::test_add").verdict.detail
    assert "missing; megaflow" in named
    assert "gave no result for them" in named, "a name that is in the report is not called absent"


def test_of_a_report_that_is_too_long_head_and_end_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_run, "_MOST_OUTPUT_BYTES", 20_000)
    shell = FolderShell(tmp_path)
    committed(shell.path("/testbed"), FILES)
    got = grade(shell, GOOD, test_command=f"echo PASSED early; seq 200000; {PYTEST}")
    assert got.verdict.reward == 1.0
    assert b"PASSED early" in got.report
    assert b" bytes left out; of the tests' output ...]" in got.report
    assert 20_000 < len(got.report) < 20_500


def test_only_what_a_run_of_tests_would_import_is_taken_from_a_patch(shell: FolderShell) -> None:
    work = shell.path("/testbed")
    for package in ("pkg", "tests"):
        (work / package).mkdir()
        (work / package / "__init__.py").touch()
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "packages")
    own = ["tests/sub/__init__.py", "tests/sub/types.py", "pkg/queue.py", "tools/queue.py", "more/argparse"]
    bad = ["src/test/__init__.py", "src/test/types.py", "xdist.py", "usercustomize/__init__.pyc", ".venv/pyvenv.cfg"]
    files = b"".join(new_file(path, "x = 1\n").encode() for path in [*own, *bad])
    link = new_file("unittest", "pkg\n", "120000").rstrip("\n") + "\n\\ No newline at end of file\n"
    got = grade(shell, GOOD + files + link.encode())
    assert (got.verdict.reward, got.verdict.suspect) == (1.0, ""), got.verdict.detail
    assert [path for path in own if not (work / path).exists()] == []
    assert [path for path in [*bad[1:], "unittest"] if os.path.lexists(work / path)] == []


def test_what_the_images_installation_left_in_the_repository_stays_unless_the_patch_changes_it(
    shell: FolderShell,
) -> None:
    work = shell.path("/testbed")
    (work / ".gitignore").write_text("*.egg-info\n")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "ignore")
    for name in ("entry_points.txt", "PKG-INFO"):
        (work / "calc.egg-info").mkdir(exist_ok=True)
        (work / "calc.egg-info" / name).write_text("Name: calc\n")
    assert grade(shell, GOOD).verdict.reward == 1.0
    assert sorted(path.name for path in (work / "calc.egg-info").iterdir()) == ["PKG-INFO", "entry_points.txt"]
    plugin = (
        b"diff --git a/calc.egg-info/entry_points.txt b/calc.egg-info/entry_points.txt\n"
        b"--- a/calc.egg-info/entry_points.txt\n+++ b/calc.egg-info/entry_points.txt\n@@ -1 +1,2 @@\n"
        b"-Name: calc\n+[pytest11]\n+x = calc\n"
    )
    git(work, "checkout", "-q", ".")
    assert "calc.egg-info/entry_points.txt" in grade(shell, GOOD + plugin).verdict.detail
    assert [path.name for path in (work / "calc.egg-info").iterdir()] == ["PKG-INFO"]


def test_helpers_of_the_tests_are_the_images_again_and_what_it_changed_of_them_stays(shell: FolderShell) -> None:
    work = shell.path("/testbed")
    (work / "tests").mkdir()
    for name in ("data.txt", "gone.txt", "own.txt"):
        (work / "tests" / name).write_text("base\n")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "tests")
    (work / "tests/own.txt").write_text("image\n")
    (work / "tests/gone.txt").unlink()
    changed = (
        b"diff --git a/tests/data.txt b/tests/data.txt\n--- a/tests/data.txt\n+++ b/tests/data.txt\n@@ -1 +1 @@\n"
        b"-base\n+mine\n"
    )
    got = grade(shell, GOOD + changed + new_file("tests/more.txt", "mine\n").encode())
    assert (got.verdict.reward, got.verdict.suspect) == (1.0, ""), got.verdict.detail
    assert got.verdict.detail.endswith("restored from the base: tests/data.txt")
    texts = {path.name: path.read_text() for path in sorted((work / "tests").iterdir())}
    assert texts == {"data.txt": "base\n", "more.txt": "mine\n", "own.txt": "image\n"}


def test_a_patch_with_files_of_a_repository_does_not_apply(shell: FolderShell) -> None:
    got = grade(shell, GOOD + new_file("tests/new/.git/HEAD", "ref: x\n").encode())
    assert (got.verdict.reward, got.verdict.counts) == (0.0, True)
    assert "does not apply: it names a file of a git repository (.git)" in got.verdict.detail
    assert git(shell.path("/testbed"), "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("/testbed", ""),
        ("import __editable___pkg_1_finder; __editable___pkg_1_finder.install()", ""),
        ("import _virtualenv", ""),
        ("import __editable__evil", "the installation changed /x/a.pth"),
        ("import __editable___a_finder; __editable___b_finder.install()", "the installation changed /x/a.pth"),
        ("import _virtualenv, evil", "the installation changed /x/a.pth"),
        ("/testbed\rimport evil", "the installation changed /x/a.pth"),
    ],
)
def test_lines_of_path_files_are_known_whole(
    shell: FolderShell, monkeypatch: pytest.MonkeyPatch, line: str, rule: str
) -> None:
    shell.put("/x/a.pth", line.encode())
    monkeypatch.setattr(restore, "runner_state", lambda _: {"/x/a.pth": "1"})
    assert restore.changed_by_install(shell, {}) == rule


def test_a_plugin_that_an_installation_registers_makes_the_verdict_suspect(
    shell: FolderShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, run = shell.path("/site"), FolderShell.run

    def below(self: FolderShell, command: str, **how: Any) -> CommandResult:
        return run(self, command.replace("find / ", f"find {shlex.quote(str(place))} "), env={"LOGS_DIR": ""}, **how)

    monkeypatch.setattr(FolderShell, "run", below)
    plugin = b"[pytest11]\nx = x\n"
    shell.put("/site/x-1.dist-info/entry_points.txt", plugin)
    before = restore.runner_state(shell)
    assert [path.rpartition("/site")[2] for path in before] == ["/x-1.dist-info/entry_points.txt"]
    shell.put("/site/x-2.dist-info/entry_points.txt", plugin)
    shell.put("/site/y-1.dist-info/entry_points.txt", b"[console_scripts]\ny = y\n")
    assert restore.changed_by_install(shell, before) == ""
    (place / "z-1.dist-info").symlink_to("/nowhere")
    assert restore.changed_by_install(shell, before).endswith("/site/z-1.dist-info")
    (place / "z-1.dist-info").unlink()
    shell.put("/site/y-1.dist-info/entry_points.txt", b"[pytest11]\ny = y\n")
    assert restore.changed_by_install(shell, before).endswith("/site/y-1.dist-info/entry_points.txt")


def test_touched_files_are_old_and_new_names_of_every_kind_of_change() -> None:
    patch = """diff --git a/old name.py b/new name.py
similarity index 90%
rename from old name.py
rename to new name.py
diff --git a/gone.py b/gone.py
deleted file mode 100644
--- a/gone.py
+++ /dev/null
@@ -1,2 +0,0 @@
--- a/not-a-file
-x
diff --git "a/t\\303\\251st.py" "b/t\\303\\251st.py"
--- "a/t\\303\\251st.py"
+++ "b/t\\303\\251st.py"
@@ -1 +1 @@
-a
+b
diff --git a/image.png b/image.png
GIT binary patch
"""
    assert touched_files(patch) == ["old name.py", "new name.py", "gone.py", "tést.py", "image.png"]
    assert touched_files("--- a/../../etc/passwd\n+++ b//etc/passwd\n") == [], "no path leads out of the repository"


def test_a_rows_own_markers_stay_inside_ours() -> None:
    start, end = ">>>>> MegaFlow 77 start", ">>>>> MegaFlow 77 end"
    own = "+ : '>>>>> Start Test Output'\nPASSED a\n+ : '>>>>> End Test Output'"
    text = f"noise\n{start}\n{own}\n{end} 0\nmore\n{end} 0\nafter"
    assert TestRun("77", text.encode(), 0).judged == f"{own}\n{end} 0\nmore"
    assert TestRun("77", text.partition(end)[0].encode(), None).judged == f"{own}\n"


class Resolves:
    """In place of the libraries: all is well."""

    def judge(self, judge: JudgeName, goal: Any, log_text: str, exit_code: int | None) -> tuple[dict[str, Any], str]:
        del judge, goal, log_text, exit_code
        return {"resolved": True, "statuses": {}}, "a library"


def test_a_library_s_marker_that_a_test_printed_makes_the_verdict_suspect() -> None:
    start, end, code = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code: 0"
    script = f"set -x\n: '{start}'\npytest\n: '{end}'\necho '{code}'\n"

    def suspect(printed: str, judge: JudgeName, *, own: bool = False) -> str:
        wanted = goal(judge=judge, test_command=script if own else "pytest")
        printed += "\n1 passed in 0.01s"
        log = f"+ : '{start}'\n{printed}\n+ : '{end}'\n+ echo '{code}'\n{code}" if own else printed
        text = f">>>>> MegaFlow 7 start\n{log}\n>>>>> MegaFlow 7 end 0\n"
        return TestsGrader(wanted, Resolves()).verdict(TestRun("7", text.encode(), 0), limit_s=1.0).suspect

    for printed in (start, end, code):
        for judge in (JudgeName.SWEBENCH_4, JudgeName.SWEBENCH_5, JudgeName.SWESMITH):
            assert "printed a marker" in suspect(f"PASSED a\n{printed}\nFAILED b", judge)
        assert "printed a marker" in suspect(f"PASSED a\n{printed}\nFAILED b", JudgeName.SWEBENCH_5, own=True)
        assert suspect(printed, JudgeName.MULTI_SWE_BENCH) == ""
    assert suspect("PASSED a", JudgeName.SWEBENCH_4) == suspect("PASSED a", JudgeName.SWEBENCH_5, own=True) == ""


def test_where_the_dataset_s_patch_is_the_bug_gold_is_what_undoes_it(tmp_path: Path) -> None:
    folder = tmp_path / "testbed"
    committed(folder, {"a.py": "one\n-- two\nthree\n", "gone.py": "x\n", "old name.py": "1\n2\n3\n4\n", "d": "\0" * 99})
    (folder / "d").write_bytes(b"\0\1" * 200)
    (folder / "new.bin").write_bytes(b"\0\2")
    (folder / "a.py").write_text("one\n++ two\nthree")
    (folder / "gone.py").unlink()
    (folder / "new.py").write_text("")
    git(folder, "mv", "old name.py", "name.py")
    (folder / "name.py").write_text("1\n2\n3\n4\n5\n")
    (folder / "name.py").chmod(0o755)
    git(folder, "add", "-A")
    bug = git(folder, "diff", "--cached", "--find-renames", "--binary", "HEAD")
    git(folder, "commit", "-qm", "bug")
    task = AgentTask(
        name="t",
        description="d",
        environment=EnvironmentSpec(image="i"),
        goal=goal(),
        solution=PatchSolution(patch=bug, reverse=True),
    )
    gold = gold_patch(task)
    assert reversed_patch(gold) == bug
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{folder}", "alone")  # git has no blob from before the bug there
    assert apply_patch(FolderShell(tmp_path, "/alone"), gold.encode()).ok
    assert ((tmp_path / "alone/d").read_bytes(), (tmp_path / "alone/new.bin").exists()) == (b"\0" * 99, False)
    assert apply_patch(FolderShell(tmp_path), gold.encode()).ok
    git(folder, "add", "-A")
    assert git(folder, "diff", "--cached", "HEAD~1") == ""
    assert set(touched_files(gold)) == set(touched_files(bug))


def test_a_failed_merge_leaves_no_conflict_marks(shell: FolderShell) -> None:
    work = shell.path("/testbed")
    before = git(work, "rev-parse", "HEAD:calc.py").strip()
    (work / "calc.py").write_text(FILES["calc.py"].replace("a - b", "a / b"))
    git(work, "commit", "-q", "-a", "-m", "moved on")
    index = f"index {before}..{'1' * 40} 100644\n--- a/calc.py".encode()
    (work / "calc2.py").write_text("untracked, and none of the patch's business\n")
    assert not apply_patch(shell, GOOD.replace(b"--- a/calc.py", index)).ok
    assert (work / "calc.py").read_text() == FILES["calc.py"].replace("a - b", "a / b")
    assert git(work, "status", "--porcelain") == "?? calc2.py\n"


def test_an_unknown_parser_and_an_empty_list_of_tests_are_refused() -> None:
    for changes in ({"log_parser": "cargo", "fail_to_pass": ("a",)}, {"fail_to_pass": ()}):
        refused = TestsGoal(base_commit="b", test_patch="", test_command="c", pass_to_pass=(), **changes)
        with pytest.raises(GradingFailed):
            grader_for(refused)
