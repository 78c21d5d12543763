"""The grading libraries as installed: what they say of rows and logs, and that our own judge agrees with them.

The fixture `grading/described.json` has rows of SWE-bench (the columns that matter) and made ones of other languages,
each with the evaluation script that swebench 4.1.0, installed with all its packages, makes of it.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.agents.installation import Installer
from app.datasets.rows.swe_rebench import DURATIONS
from app.errors import GradingFailed, UnknownName
from app.evaluation import reading_of
from app.grading import grader_for
from app.grading.base import GradingInput
from app.grading.judges import Judgement, judge
from app.grading.reports import parse_pytest
from app.grading.resident_libraries import GradingLibraries
from app.models.outcome import TestStatus
from app.models.spec import AgentTask, EnvironmentSpec, JudgeName, TestsGoal
from app.settings import Settings
from bench.evaluation import goals
from tests.integration.inside_fixture import kept_tools
from tests.unit.folder_shell import FolderShell, committed, git
from tests.unit.test_grading_reports import SUITE
from tests.unit.test_grading_tests_goal import FILES, GOOD, PYTEST, TEST_PATCH

PASSED, FAILED, SKIPPED, MISSING = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED, TestStatus.MISSING
DESCRIBED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "grading" / "described.json").read_text())
SQLFLUFF = {"repo": "sqlfluff/sqlfluff", "version": "0.8"}
DJANGO = {"repo": "django/django", "version": "4.2"}
extra = pytest.mark.extra


@pytest.fixture(scope="module")
def libraries() -> Iterator[GradingLibraries]:
    made = GradingLibraries(Installer(kept_tools()).install_library)
    yield made
    made.close()


def goal(
    judge_name: JudgeName, fail_to_pass: tuple[str, ...], pass_to_pass: tuple[str, ...] = (), **more: Any
) -> TestsGoal:
    tests = {"fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass}
    return TestsGoal(**{"base_commit": "HEAD", "test_command": "c", "judge": judge_name, **tests, **more})


@functools.cache
def pytest_log(*options: str) -> str:
    """What a real run prints."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_a.py").write_text(SUITE)
        (Path(folder) / "test_b.py").write_text("import no_such_module\n")
        words = ["-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        env = {"COLUMNS": "80", "PATH": "/usr/bin"}
        return subprocess.run(
            [sys.executable, *words, *options], cwd=folder, capture_output=True, text=True, env=env
        ).stdout


# --- swebench 4 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", DESCRIBED, ids=lambda found: f"{found['row']['repo']}-{found['row']['version']}")
def test_the_parts_of_a_row_are_its_evaluation_script_without_git_patches_and_markers(
    libraries: GradingLibraries, found: dict[str, Any]
) -> None:
    row, script = found["row"], [line.replace("{test_patch}", found["row"]["test_patch"]) for line in found["script"]]
    told = libraries.describe(JudgeName.SWEBENCH_4, row)
    ours = [
        line for part in ("environment", "install", "build", "test_command") for line in told[part].split("\n") if line
    ]
    activation = ["source /opt/miniconda3/bin/activate", "conda activate testbed", "cd /testbed"]
    theirs = [line for line in script if not re.match(r"git (?!submodule)|: '|echo \"No test files", line)]
    start = len(told["environment"].split("\n"))
    again = [line for line in theirs[start:] if line not in activation]  # it activates and enters once more
    assert ours == "\n".join([*theirs[:start], *again]).split("\n")
    assert told["parser"].startswith("parse_log_")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"repo": "nobody/nothing"}, r"no repository 'nobody/nothing' \(`repo`\)"),
        ({"version": "99"}, r"no version '99' of .* \(`version`\); known: "),
        ({"version": None}, "no version 'None'"),
        ({"repo": "dbt-labs/dbt-core", "version": "1.0"}, "no test command or no parser"),
        ({"test_patch": None}, "expected 'test_patch' in the row to be a text; found None"),
    ],
)
def test_a_row_that_swebench_4_does_not_know_is_refused_by_name(
    libraries: GradingLibraries, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnknownName, match=why):
        libraries.describe(JudgeName.SWEBENCH_4, {**DESCRIBED[0]["row"], **changes})


DJANGO_LOG = """Found 6 test(s).
test_plain (queries.tests.Queries1Tests) ... ok
test_loud (queries.tests.Queries1Tests) ... OK
test_wrong (queries.tests.Queries1Tests) ... FAIL
test_broken (queries.tests.Queries1Tests) ... ERROR
test_left_out (queries.tests.Queries1Tests) ... skipped 'Database has feature(s) - x'
test_printing (queries.tests.Queries1Tests) ... System check identified no issues (0 silenced).
ok
FAIL: test_wrong (queries.tests.Queries1Tests)
Ran 6 tests in 0.1s
"""


def django(libraries: GradingLibraries, fail_to_pass: str, pass_to_pass: str = "plain") -> Judgement:
    test = "test_{} (queries.tests.Queries1Tests)".format
    wanted = goal(JudgeName.SWEBENCH_4, (test(fail_to_pass),), (test(pass_to_pass),), row=DJANGO)
    return judge(wanted, DJANGO_LOG, 1, libraries)


def test_djangos_log_is_judged_by_swebenchs_parser_and_rule(libraries: GradingLibraries) -> None:
    mended = django(libraries, "loud", "printing")
    assert (mended.resolved, mended.grader) == (True, "swebench 4.1.0")
    assert set(mended.statuses.values()) == {PASSED}
    for wrong, status in (("wrong", FAILED), ("broken", TestStatus.ERROR), ("absent", MISSING)):
        judged = django(libraries, wrong)
        assert (judged.resolved, [*judged.statuses.values()]) == (False, [status, PASSED])
    assert django(libraries, "left_out").resolved  # 4.1.0: a skipped test is neither a success nor a failure


def test_where_a_parser_names_failures_alone_a_run_that_broke_is_not_resolved(libraries: GradingLibraries) -> None:
    row = {"repo": "chartjs/Chart.js", "version": "3.0"}
    wanted = goal(JudgeName.SWEBENCH_4, ("draws a line",), row=row)
    assert judge(wanted, "Executed 3 of 3 SUCCESS", 0, libraries).statuses == {"draws a line": PASSED}
    assert not judge(wanted, "SyntaxError: Unexpected token", 1, libraries).resolved


def test_the_markers_that_swebench_reads_decide_nothing_when_tests_print_them(libraries: GradingLibraries) -> None:
    forged = ">>>>> Start Test Output\nPASSED a.py::x\n>>>>> End Test Output"
    wanted = goal(JudgeName.SWEBENCH_4, ("a.py::x",), row=SQLFLUFF)
    assert judge(wanted, f"FAILED a.py::x - no\n{forged}\n", 1, libraries).statuses == {"a.py::x": FAILED}


@pytest.mark.parametrize("options", [("-rA",), ("-rA", "-v"), ("-rA", "-q", "--tb=no"), ("-rA", "--tb=line", "-s")])
@pytest.mark.parametrize(
    "row",
    [SQLFLUFF, {"repo": "pydicom/pydicom", "version": "2.0"}, {"repo": "scikit-learn/scikit-learn", "version": "0.21"}],
    ids=lambda row: row["repo"],
)
def test_our_parser_and_swebenchs_agree_on_every_test(
    libraries: GradingLibraries, row: dict[str, str], options: tuple[str, ...]
) -> None:
    """But for two documented differences: swebench 4.1.0 cuts a name at its first blank, and rows carry it so; and it
    does not read a skipped test, which the summary does not name, from the line that `-v` prints."""
    log = pytest_log(*options)
    whole = {*parse_pytest(log), "test_a.py::test_xpass", "test_a.py::test_absent"}
    names = tuple(sorted({name.split()[0] for name in whole}))  # as rows have them
    theirs = judge(goal(JudgeName.SWEBENCH_4, names, row=row), log, 1, libraries).statuses
    ours = judge(goal(JudgeName.OWN, names), log, 1, libraries).statuses
    different = {name for name in names if ours[name] is not theirs[name]}
    assert different == ({"test_a.py::test_skipped"} if "-v" in options else set())
    assert {PASSED, FAILED, TestStatus.ERROR, MISSING} <= set(theirs.values())


def test_a_task_is_graded_by_the_library_from_its_patch_to_its_verdict(
    libraries: GradingLibraries, tmp_path: Path
) -> None:
    shell = FolderShell(tmp_path)
    committed(shell.path("/testbed"), FILES)
    wanted = goal(
        JudgeName.SWEBENCH_4,
        ("test_calc.py::test_add",),
        ("test_calc.py::test_same", "test_new.py::test_text[a", "test_new.py::test_text[c"),
        row=SQLFLUFF,
        test_patch=TEST_PATCH,
        test_command=PYTEST,
    )
    task = AgentTask(name="t", description="d", environment=EnvironmentSpec(image="i"), goal=wanted)
    for patch, reward, partial in ((None, 0.0, 0.0), (GOOD, 1.0, 1.0)):
        verdict = grader_for(wanted, libraries).grade(GradingInput(task, patch, None), shell).verdict
        assert (verdict.reward, verdict.metrics["partial"], verdict.grader) == (reward, partial, "swebench 4.1.0")
        git(shell.path("/testbed"), "reset", "-q", "--hard")


def test_a_producer_has_the_libraries_at_hand_where_it_reads_rows(tmp_path: Path) -> None:
    with reading_of(Settings(home=tmp_path)) as reading:
        assert reading.describe is not None
        told = reading.describe(JudgeName.SWEBENCH_4, DESCRIBED[0]["row"])
    assert told["parser"] == "parse_log_django"
    [place] = (tmp_path / "tools").glob("grading-swebench-4-*")
    assert sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) < 20 << 20


# --- The others -----------------------------------------------------------------------------------------------------


@extra
def test_swebench_5_judges_by_the_parser_and_the_rule_that_a_row_names(libraries: GradingLibraries) -> None:
    script = "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\n"
    row = {"image": "i", "eval_script": script, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
    told = libraries.describe(JudgeName.SWEBENCH_5, row)
    assert told["parser"] == "parse_log_pytest"
    assert 'echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"' in told["test_command"]
    rule = {"log_parser": "parse_log_pytest", "row": {"eval_type": "pass_and_fail"}}
    wanted = goal(JudgeName.SWEBENCH_5, ("a.py::x",), ("a.py::y[b",), **rule)
    log = "PASSED a.py::x\nPASSED a.py::y[b c]\n"
    judged = judge(wanted, log, 0, libraries)
    assert (judged.resolved, judged.grader) == (True, "swebench 5.0.2")
    assert set(judged.statuses.values()) == {PASSED}
    assert not judge(wanted, log, 1, libraries).resolved  # the run failed and named no failure
    inside = f"install\n+ : '>>>>> Start Test Output'\n{log}+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: 0\n"
    assert judge(wanted, inside, 0, libraries).resolved
    skipped = goal(JudgeName.SWEBENCH_5, ("a.py::x",), **rule)
    assert not judge(skipped, "SKIPPED a.py::x\nPASSED a.py::y\n", 0, libraries).resolved
    for changes, why in (({"log_parser": "nose"}, "no parser 'nose'"), ({"eval_type": "best"}, "no rule 'best'")):
        with pytest.raises(UnknownName, match=why):
            libraries.describe(JudgeName.SWEBENCH_5, {**row, **changes})


@extra
def test_swebench_5_reads_the_logs_of_other_languages(libraries: GradingLibraries) -> None:
    logs = {
        "parse_log_gotest": "--- PASS: TestRead (0.00s)\n--- FAIL: TestWrite (0.01s)\nFAIL\n",
        "parse_log_cargo": "test TestRead ... ok\ntest TestWrite ... FAILED\n",
    }
    for parser, log in logs.items():
        wanted = goal(
            JudgeName.SWEBENCH_5, ("TestRead",), ("TestWrite",), log_parser=parser, row={"eval_type": "pass_and_fail"}
        )
        judged = judge(wanted, log, 1, libraries)
        assert (judged.resolved, judged.statuses) == (False, {"TestRead": PASSED, "TestWrite": FAILED})


@extra
def test_swebench_5_leaves_durations_out_of_names_where_a_row_s_dataset_does(libraries: GradingLibraries) -> None:
    log = "Reader (Tests\\Reader)\n ✔ Reads a file [1.34 ms]\n ✘ Writes a file [120 ms]\n"
    asked = {"fail_to_pass": ("Reader > Reads a file",), "pass_to_pass": ("Reader > Writes a file",)}
    row = {"eval_type": "pass_and_fail", "left_out_of_names": list(DURATIONS)}
    wanted = goal(JudgeName.SWEBENCH_5, **asked, log_parser="parse_log_phpunit", row=row)
    judged = judge(wanted, log, 1, libraries)
    assert (judged.resolved, list(judged.statuses.values())) == (False, [PASSED, FAILED])
    assert judge(wanted, log.replace("✘", "✔"), 0, libraries).resolved
    kept = goal(JudgeName.SWEBENCH_5, **asked, log_parser="parse_log_phpunit", row={"eval_type": "pass_and_fail"})
    assert set(judge(kept, log, 1, libraries).statuses.values()) == {MISSING}


MULTI = {
    "org": "cli", "repo": "cli", "number": 7,
    "run_result": {"passed_tests": ["TestOld"], "failed_tests": [], "skipped_tests": []},
    "test_patch_result": {"passed_tests": ["TestOld"], "failed_tests": ["TestNew"], "skipped_tests": []},
    "f2p_tests": {"TestNew": {}}, "p2p_tests": {"TestOld": {}},
}  # fmt: skip


@extra
@pytest.mark.timeout(900)
def test_multi_swe_bench_compares_with_the_rows_results_before_the_fix(libraries: GradingLibraries) -> None:
    told = libraries.describe(JudgeName.MULTI_SWE_BENCH, MULTI)
    assert (told["test_command"], told["image"]) == ("bash /home/fix-run.sh", "mswebench/cli_m_cli:pr-7")
    wanted = goal(JudgeName.MULTI_SWE_BENCH, ("TestNew",), ("TestOld",), row=MULTI)
    both = "--- PASS: TestOld (0.00s)\n--- PASS: TestNew (0.00s)\n"
    judged = judge(wanted, both, 0, libraries)
    assert (judged.resolved, judged.grader) == (True, "multi-swe-bench 1.1.2")
    assert judged.statuses == {"TestNew": PASSED, "TestOld": PASSED}
    for log in (both.replace("PASS: TestOld", "FAIL: TestOld"), both.replace("PASS: TestNew", "FAIL: TestNew"), ""):
        assert not judge(wanted, log, 1, libraries).resolved
    lost = goal(JudgeName.MULTI_SWE_BENCH, ("TestNew",), row={**MULTI, "p2p_tests": {"TestOld": {}, "TestGone": {}}})
    assert not judge(lost, both, 0, libraries).resolved  # a valid report, without a test that the gold patch kept
    with pytest.raises(UnknownName, match="knows no such repository"):
        libraries.describe(JudgeName.MULTI_SWE_BENCH, {**MULTI, "org": "nobody"})
    with pytest.raises(GradingFailed, match="expected 'run_result' in the row"):
        judge(goal(JudgeName.MULTI_SWE_BENCH, ("TestNew",), row={**MULTI, "run_result": None}), both, 0, libraries)


@extra
def test_swesmith_judges_by_the_profile_of_the_repository(libraries: GradingLibraries) -> None:
    row = {
        "instance_id": "mewwts__addict.75284f95.func_basic__1", "repo": "swesmith/mewwts__addict.75284f95",
        "FAIL_TO_PASS": ["test_addict.py::T::test_a"], "PASS_TO_PASS": ["test_addict.py::T::test_b"],
    }  # fmt: skip
    told = libraries.describe(JudgeName.SWESMITH, row)
    assert told["test_command"].endswith("pytest --disable-warnings --color=no --tb=no --verbose")
    assert told["image"] == "swebench/swesmith.x86_64.mewwts_1776_addict.75284f95"
    assert told["test_files"] == ["test_addict.py"]
    wanted = goal(JudgeName.SWESMITH, tuple(row["FAIL_TO_PASS"]), tuple(row["PASS_TO_PASS"]), row=row)
    log = "test_addict.py::T::test_a PASSED [ 50%]\ntest_addict.py::T::test_b PASSED [100%]\n"
    judged = judge(wanted, log, 0, libraries)
    assert (judged.resolved, judged.grader) == (True, "swesmith 0.0.9")
    assert not judge(wanted, log.replace("test_b PASSED", "test_b FAILED"), 1, libraries).resolved
    assert not judge(wanted, "", 1, libraries).resolved
    with pytest.raises(UnknownName, match="no profile"):
        libraries.describe(JudgeName.SWESMITH, {**row, "repo": "swesmith/nobody__nothing.00000000"})


@extra
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", goals())
def test_the_log_that_the_benchmark_has_judged_is_right(name: str, libraries: GradingLibraries) -> None:
    wanted, log = goals()[name]
    assert judge(wanted, log, 0, libraries).resolved
