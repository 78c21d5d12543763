"""Grading named tests on a clean checkout: real git, real pytest, in a temporary folder."""

# ruff: noqa: W293 -- an empty line of context is a blank in a patch

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from app.errors import GradingFailed, TestRunnerMissing
from app.grading import grader_for, tests_goal
from app.grading.base import Grade, GradingInput
from app.grading.tests_goal import END, START, apply_patch, between_markers, touched_files
from app.models.outcome import TestStatus
from app.models.shell import CommandResult
from app.models.spec import AgentTask, EnvironmentSpec, Limits, TestsGoal
from tests.unit.folder_shell import FolderShell, committed, git

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


def grade(shell: FolderShell, patch: bytes | None, **changes) -> Grade:
    timeout_s = changes.pop("timeout_s", 60.0)
    fields = {
        "base_commit": "HEAD",
        "test_patch": TEST_PATCH,
        "test_command": PYTEST,
        "fail_to_pass": ("test_calc.py::test_add",),
        "pass_to_pass": ("test_calc.py::test_same", *TEXTS),
    }
    goal = TestsGoal(**{**fields, **changes})
    task = AgentTask(
        name="t",
        description="d",
        environment=EnvironmentSpec(image="i"),
        goal=goal,
        limits=Limits(grading_timeout_s=timeout_s),
    )
    return grader_for(goal).grade(GradingInput(task, patch, None), shell)


def test_a_patch_that_mends_the_bug_gets_reward_1_and_the_whole_report_is_kept(shell: FolderShell) -> None:
    got = grade(shell, GOOD)
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


def test_a_patch_that_does_not_apply_is_a_verdict_in_gits_words(shell: FolderShell) -> None:
    got = grade(shell, GOOD.replace(b"return a - b", b"return a * b"))
    assert got.verdict.reward == 0.0
    assert got.verdict.counts
    assert "does not apply" in got.verdict.detail
    assert "calc.py" in got.verdict.detail
    assert git(shell.path("/testbed"), "status", "--porcelain") == ""


def test_a_patch_with_shifted_context_still_applies(shell: FolderShell) -> None:
    shifted = GOOD.replace(b" def same(a):\n", b" def other(a):\n")
    assert grade(shell, shifted).verdict.reward == 1.0


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
    command = f"{sys.executable} -m pytest -v -p no:cacheprovider test_new.py test_calc.py"
    got = grade(shell, loop, timeout_s=4.0, test_command=command)
    assert (got.verdict.reward, got.verdict.counts) == (0.0, True)
    assert got.verdict.detail == "tests did not end within 4 s"
    assert b"test_text[a b] PASSED" in got.report


def test_passed_tests_count_only_when_the_command_ends(shell: FolderShell) -> None:
    command = f"{sys.executable} -m pytest -v -p no:cacheprovider test_new.py test_calc.py; sleep 60"
    got = grade(shell, GOOD, timeout_s=12.0, test_command=command)
    assert set(got.verdict.tests.values()) == {TestStatus.PASSED}
    assert got.verdict.reward == 0.0


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


def test_a_test_patch_that_does_not_apply_is_the_graders_failure(shell: FolderShell) -> None:
    with pytest.raises(GradingFailed, match="expected the row's test_patch to apply"):
        grade(shell, GOOD, test_patch=TEST_PATCH.replace("-from calc import same", "-from nowhere import same"))


def test_an_unknown_base_commit_is_the_graders_failure(shell: FolderShell) -> None:
    with pytest.raises(GradingFailed, match="is that commit in the image's repository"):
        grade(shell, GOOD, base_commit="1" * 40)


def test_a_missing_test_program_is_the_graders_failure(shell: FolderShell) -> None:
    with pytest.raises(TestRunnerMissing, match="no-such-runner"):
        grade(shell, GOOD, test_command="no-such-runner -rA")


def test_a_working_folder_without_a_repository_is_the_graders_failure(tmp_path: Path) -> None:
    with pytest.raises(GradingFailed, match="expected a git repository"):
        grade(FolderShell(tmp_path), None, test_patch="")


def test_an_unknown_parser_and_an_empty_list_of_tests_are_refused() -> None:
    for changes in ({"log_parser": "cargo", "fail_to_pass": ("a",)}, {"fail_to_pass": ()}):
        goal = TestsGoal(base_commit="b", test_patch="", test_command="c", pass_to_pass=(), **changes)
        with pytest.raises(GradingFailed):
            grader_for(goal)


def test_the_report_is_whole_even_when_it_is_larger_than_a_commands_output(shell: FolderShell) -> None:
    command = "seq 1 400000; echo 'a.py::test_x PASSED'; seq 1 400000"
    got = grade(shell, None, test_command=command, fail_to_pass=("a.py::test_x",), pass_to_pass=())
    assert got.verdict.reward == 1.0
    assert len(got.report) > 5_000_000


class Watched(FolderShell):
    """Its kernel kills for memory while the tests run; all of a report that is read out is kept."""

    def run(self, command: str, **how: Any) -> CommandResult:
        result = super().run(command, **how)
        logs = ("0007.stdout",) if "head -c" in command and len(result.stdout) > 1000 else ()
        return dataclasses.replace(result, out_of_memory=START in command, logs=logs)


def test_tests_that_are_missing_for_want_of_memory_say_so(tmp_path: Path) -> None:
    shell = Watched(tmp_path)
    committed(shell.path("/testbed"), FILES)
    verdict = grade(shell, GOOD, test_command="kill -9 $$").verdict
    assert (verdict.reward, verdict.counts) == (0.0, True)
    limit_bytes = EnvironmentSpec(image="i", workdir="/testbed").resources.memory_bytes
    assert (
        f"missing; while the tests ran, processes were killed at the environment's memory limit of {limit_bytes} bytes"
        in (verdict.detail.replace(" and 1 more", ""))
    )


def test_a_report_that_is_too_long_is_judged_and_says_where_all_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tests_goal, "_MAX_REPORT_BYTES", 20_000)
    shell = Watched(tmp_path)
    committed(shell.path("/testbed"), FILES)
    got = grade(shell, GOOD, test_command=f"seq 200000; {PYTEST}")
    assert got.verdict.reward == 1.0
    assert b"too long to be kept whole here: all of it is 0007.stdout in the attempt's command_logs ...]" in got.report
    assert 20_000 < len(got.report) < 20_200


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


def test_no_path_leads_out_of_the_repository() -> None:
    assert touched_files("--- a/../../etc/passwd\n+++ b//etc/passwd\n") == []


def test_a_rows_own_markers_inside_ours_are_the_ones_that_count() -> None:
    text = f"{START}\nnoise\n+ : '{START}'\nPASSED a\n+ : '{END}'\nmore\n{END}\n"
    assert between_markers(text).strip().startswith("'\nPASSED a")
    assert "noise" not in between_markers(text)
    assert between_markers("no markers at all") == "no markers at all"
