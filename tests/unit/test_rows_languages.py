"""Multi-SWE-bench and -RL, SWE-bench-Live and MultiLang, SWE-bench Pro: rows of many languages.

Columns: multi-swe-bench 1.1.2, harness/dataset.py and what it is made of; microsoft/SWE-bench-Live, evaluation.py and
push_multilang.py; the dataset card ScaleAI/SWE-bench_Pro. Steps of the last: scaleapi/SWE-bench_Pro-os.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from app.datasets.row_doubts import doubt
from app.datasets.row_files import RawRow
from app.datasets.source import open_dataset
from app.errors import DatasetInvalid
from app.grading.reports import PARSERS
from app.models.outcome import TestStatus
from app.models.spec import JudgeName, PatchSolution
from tests.unit.dataset_adapters import reading
from tests.unit.folder_shell import committed, git
from tests.unit.row_reading import CLASSIC, PATCH, SHA, TEST_PATCH, bash, goal_of, read, without

# --- Multi-SWE-bench -------------------------------------------------------------------------------------------------


def result(passed: list[str], failed: list[str]) -> dict[str, Any]:
    return {
        "passed_count": len(passed), "failed_count": len(failed), "skipped_count": 0,
        "passed_tests": passed, "failed_tests": failed, "skipped_tests": [],
    }  # fmt: skip


MULTI: dict[str, Any] = {
    "org": "BurntSushi", "repo": "ripgrep", "number": 2209, "state": "closed", "title": "Fix it", "body": None,
    "base": {"label": "BurntSushi:master", "ref": "master", "sha": SHA},
    "resolved_issues": [{"number": 2208, "title": "Replace loses the last line", "body": "See here."}],
    "fix_patch": PATCH, "test_patch": TEST_PATCH,
    "run_result": result(["a"], []), "test_patch_result": result(["a"], ["b"]),
    "fix_patch_result": result(["a", "b"], []),
    "fixed_tests": {"b": {"run": "NONE", "test": "FAIL", "fix": "PASS"}},
    "f2p_tests": {"b": {"run": "NONE", "test": "FAIL", "fix": "PASS"}}, "s2p_tests": {}, "n2p_tests": {},
    "p2p_tests": {"a": {"run": "PASS", "test": "PASS", "fix": "PASS"}}, "lang": "rust",
}  # fmt: skip


@pytest.mark.parametrize("dataset", ["multi-swe-bench", "multi-swe-rl"])
def test_a_row_is_judged_by_the_image_s_own_script(dataset: str) -> None:
    task = read(dataset, MULTI)
    goal = goal_of(task)
    assert task.name == "BurntSushi__ripgrep-2209"
    assert task.description == "Replace loses the last line\nSee here."
    assert (task.environment.image, task.environment.workdir) == (
        "docker.io/mswebench/burntsushi_m_ripgrep:pr-2209", "/home/ripgrep",
    )  # fmt: skip
    assert (goal.judge, goal.test_command) == (JudgeName.MULTI_SWE_BENCH, "bash /home/fix-run.sh")
    assert (goal.patch_path, goal.test_patch_path) == ("/home/fix.patch", "/home/test.patch")
    assert (goal.base_commit, goal.test_patch) == (SHA, TEST_PATCH)
    assert (goal.fail_to_pass, goal.pass_to_pass) == (("b",), ("a",))
    assert task.solution == PatchSolution(patch=PATCH)
    assert task.environment.setup == ("rm -f /home/fix.patch /home/test.patch",), "the image holds the answer"
    assert (goal.row["org"], goal.row["number"], goal.row["run_result"]) == ("BurntSushi", 2209, MULTI["run_result"])
    assert goal.row["test_patch_result"] == MULTI["test_patch_result"]
    assert not {"fix_patch", "fix_patch_result", "body"} & goal.row.keys()


def test_a_numbered_row_is_of_the_images_that_the_package_names() -> None:
    more = {"number_interval": "ripgrep_2209_to_1000"}
    task = read("multi-swe-rl", {**MULTI, **more})
    assert task.environment.image == "docker.io/envagent/burntsushi_m_ripgrep:pr-2209"
    assert goal_of(task).row.items() >= more.items()


def test_lint_names_an_id_of_another_number_and_a_patch_of_tests_as_the_answer() -> None:
    def said(**changes: object) -> str:
        raw = RawRow(Path("rows.jsonl"), 1, {**MULTI, **changes})
        return str(doubt(raw, read("multi-swe-bench", raw.values), {}))

    assert said() == "None"
    assert said(instance_id="BurntSushi__ripgrep-2209") == "None"
    number = "field number: expected the number that the id 'BurntSushi__ripgrep-2210' ends with; found 2209"
    assert number in said(instance_id="BurntSushi__ripgrep-2210")
    assert "field test_patch: expected another patch than that in fix_patch" in said(fix_patch=TEST_PATCH)


# --- SWE-bench-Live --------------------------------------------------------------------------------------------------

PYTHON = without(
    CLASSIC, repo="amoffat/sh", instance_id="amoffat__sh-744", log_parser="pytest", test_cmds=["pytest -rA"],
    FAIL_TO_PASS=["tests/sh_test.py::FunctionalTests::test_a"], PASS_TO_PASS=[], pull_number="744",
)  # fmt: skip
PROGRAM = """import re

def parser(log: str) -> dict[str, str]:
    words = {"ok": "pass", "FAILED": "fail", "ignored": "skip"}
    return {name: words[word] for name, word in re.findall(r"^test (\\S+) \\.\\.\\. (\\w+)$", log, re.M)}
"""
RUST = without(
    PYTHON, "environment_setup_commit", "version", repo="a/b", instance_id="a__b-1", log_parser=PROGRAM,
    docker_image="starryzhang/sweb.eval.x86_64.a_1776_b-1", rebuild_cmds=["touch built"],
    test_cmds=["[ -f built ] && echo 'test one ... ok' >log.txt", "echo 'test two ... FAILED' >>log.txt; echo test x"],
    print_cmds=["cat log.txt"], FAIL_TO_PASS=["one"], PASS_TO_PASS=["two"],
)  # fmt: skip


def run(row: dict[str, Any], tmp_path: Path) -> str:
    goal = goal_of(read("swe-bench-live", row))
    assert bash(goal.build_command, tmp_path).returncode == 0
    command = goal.test_command.replace("/tmp/megaflow-live", str(tmp_path / "live"))
    done = bash(command, tmp_path)
    return done.stdout + done.stderr


def test_a_python_row_is_read_by_pytest_s_parser_and_brings_its_commands() -> None:
    task = read("swe-bench-live", PYTHON)
    goal = goal_of(task)
    assert task.environment.image == "docker.io/starryzhang/sweb.eval.x86_64.amoffat_1776_sh-744:latest"
    assert (task.environment.workdir, task.environment.env) == ("/testbed", {})
    assert (goal.judge, goal.log_parser, goal.test_command) == (
        JudgeName.SWEBENCH_5, "parse_log_pytest", "pytest -rA",
    )  # fmt: skip


def test_only_what_is_printed_last_is_read() -> None:
    row = without(PYTHON, rebuild_cmds=["make"], test_cmds=["a", "b"], print_cmds=["cat log"])
    goal = goal_of(read("swe-bench-live", row))
    assert (goal.build_command, goal.test_command) == ("make", "{ a ; b\n} >/dev/null 2>&1\ncat log")
    assert goal.row["eval_type"] == "pass_and_fail"


def test_the_program_of_a_row_reads_the_report_inside(tmp_path: Path) -> None:
    goal = goal_of(read("swe-bench-live", RUST))
    assert (goal.judge, goal.log_parser) == (JudgeName.OWN, "swe-bench-live")
    said = run(RUST, tmp_path)
    assert PARSERS[goal.log_parser](said) == {"one": TestStatus.PASSED, "two": TestStatus.FAILED}
    assert "test x" not in said


def test_a_module_that_a_test_wrote_beside_the_report_is_not_read(tmp_path: Path) -> None:
    forge = f"def dump(what, file):\n    file.write('{{}}')\nopen({str(tmp_path / 'read')!r}, 'w')"
    planted = f"printf '%s\\n' {shlex.quote(forge)} >/tmp/megaflow-live/json.py"
    said = run(without(RUST, test_cmds=[planted, *RUST["test_cmds"]]), tmp_path)
    assert PARSERS["swe-bench-live"](said) == {"one": TestStatus.PASSED, "two": TestStatus.FAILED}
    assert (tmp_path / "live" / "json.py").exists()
    assert not (tmp_path / "read").exists()


def test_a_program_that_fails_reports_nothing(tmp_path: Path) -> None:
    said = run(without(RUST, log_parser="def parser(log):\n    raise ValueError\n"), tmp_path)
    assert "ValueError" in said
    assert PARSERS["swe-bench-live"](said) == {}
    program = "def status():\n    return 'skip'\n\ndef parser(log):\n    return {'a': status()}\n"
    assert PARSERS["swe-bench-live"](run(without(RUST, log_parser=program), tmp_path)) == {"a": TestStatus.SKIPPED}


# --- SWE-bench Pro ---------------------------------------------------------------------------------------------------

PRO_ID = f"instance_flipt-io__flipt-{'c' * 40}"
PRO: dict[str, Any] = {
    "instance_id": PRO_ID, "repo": "flipt-io/flipt", "base_commit": SHA, "patch": PATCH, "test_patch": PATCH,
    "problem_statement": "The cache forgets.", "requirements": "- It must not.", "interface": "None.",
    "repo_language": "go", "fail_to_pass": "['TestCache', 'TestIt/with \"quotes\"']", "pass_to_pass": '["TestOld"]',
    "before_repo_set_cmd": f"git reset --hard {SHA}\ngit clean -fd \ngit checkout {SHA} \ntouch laid-out",
    "selected_test_files_to_run": "['TestCache', 'TestIt/with \"quotes\"']",
    "dockerhub_tag": f"flipt-io.flipt-{PRO_ID[9:]}",
}  # fmt: skip
RUN = 'echo "said $1"; [ -f laid-out ] && echo "PASS TestCache"; echo oops >&2\n'
PARSER = """import json, sys
passed = [line.split()[1] for line in open(sys.argv[1]) if line.startswith("PASS ")]
assert "oops" in open(sys.argv[2]).read()
tests = [{"name": name, "status": "PASSED"} for name in passed] + [{"name": "TestOld", "status": "SKIPPED"}]
json.dump({"tests": tests}, open(sys.argv[3], "w"))
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """The folder of the rows, with the scripts of one task."""
    scripts = tmp_path / "rows" / "run_scripts" / PRO_ID
    scripts.mkdir(parents=True)
    (scripts / "run_script.sh").write_text(RUN)
    (scripts / "parser.py").write_text(PARSER)
    return tmp_path / "rows"


def test_a_row_is_tested_by_the_scripts_beside_it(beside: Path) -> None:
    task = read("swe-bench-pro", PRO, beside)
    goal = goal_of(task)
    assert task.environment.image == f"docker.io/jefzda/sweap-images:{PRO['dockerhub_tag']}"
    assert task.environment.workdir == "/app"
    assert task.description == (
        "The cache forgets.\n\nRequirements:\n- It must not.\n\nNew interfaces introduced:\nNone."
    )
    assert (goal.judge, goal.log_parser, goal.test_patch) == (JudgeName.OWN, "swe-bench-pro", "")
    assert goal.fail_to_pass == ("TestCache", 'TestIt/with "quotes"')
    assert goal.pass_to_pass == ("TestOld",)
    assert goal.test_command.startswith("touch laid-out\n")


def test_the_command_lays_out_runs_and_reports_what_the_tests_do_not_print_themselves(
    beside: Path, tmp_path: Path
) -> None:
    forged = 'echo ">>>>> Tests as JSON"; echo \'{"tests": [{"name": "TestIt", "status": "PASSED"}]}\'\n'
    (beside / "run_scripts" / PRO_ID / "run_script.sh").write_text(RUN + forged)
    goal = goal_of(read("swe-bench-pro", PRO, beside))
    command = goal.test_command.replace("/workspace", str(tmp_path / "workspace"))
    done = bash(command.replace("python ", "python3 "), tmp_path)
    assert 'said TestCache,TestIt/with "quotes"' in done.stdout
    assert PARSERS["swe-bench-pro"](done.stdout) == {"TestCache": TestStatus.PASSED, "TestOld": TestStatus.SKIPPED}
    assert done.returncode == 0


def test_a_parser_that_fails_reports_nothing_and_says_so(beside: Path, tmp_path: Path) -> None:
    (beside / "run_scripts" / PRO_ID / "parser.py").write_text("raise SystemExit(3)\n")
    command = goal_of(read("swe-bench-pro", PRO, beside)).test_command.replace("/workspace", str(tmp_path / "w"))
    done = bash(command.replace("python ", "python3 "), tmp_path)
    assert (done.returncode, PARSERS["swe-bench-pro"](done.stdout)) == (3, {})


def test_the_environment_begins_at_the_base_commit(tmp_path: Path, beside: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    committed(app, {"a": "1\n"})
    base = git(app, "rev-parse", "HEAD").strip()
    (app / "a").write_text("2\n")
    git(app, "commit", "-qam", "later")
    [setup] = read("swe-bench-pro", without(PRO, base_commit=base), beside).environment.setup
    assert bash(setup, app).returncode == 0
    assert (git(app, "rev-parse", "HEAD").strip(), (app / "a").read_text()) == (base, "1\n")


@pytest.mark.parametrize("folder", [None, Path("/nowhere")])
def test_a_row_without_its_scripts_is_refused_with_what_to_get(folder: Path | None) -> None:
    with pytest.raises(DatasetInvalid, match=r"run_scripts.*scaleapi/SWE-bench_Pro-os"):
        read("swe-bench-pro", PRO, folder)


def test_scripts_that_lie_elsewhere_are_not_read(beside: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the host's own")
    (beside / "run_scripts" / PRO_ID / "parser.py").unlink()
    (beside / "run_scripts" / PRO_ID / "parser.py").symlink_to(tmp_path / "secret")
    with pytest.raises(DatasetInvalid, match="link that leads out"):
        read("swe-bench-pro", PRO, beside)
    with pytest.raises(DatasetInvalid, match="field instance_id: expected at most 200 letters"):
        read("swe-bench-pro", without(PRO, instance_id="a/../../x"), beside)


def test_a_copy_takes_the_scripts_along(beside: Path, tmp_path: Path) -> None:
    (beside / "rows.jsonl").write_text(json.dumps(PRO) + "\n")
    copied = tmp_path / "copied"
    copied.mkdir()
    open_dataset(f"swe-bench-pro={beside / 'rows.jsonl'}", reading()).copy({PRO_ID}, copied)
    (task,) = open_dataset(f"swe-bench-pro={copied / 'rows.jsonl'}", reading()).tasks()
    assert task.name == PRO_ID


# --- All of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "row", "complaint"),
    [
        ("multi-swe-bench", without(MULTI, run_result=[]), "run_result: expected an object"),
        ("multi-swe-bench", without(MULTI, run_result={**MULTI["run_result"], "passed_count": 7}), "count: expected 1"),
        ("multi-swe-bench", without(MULTI, base="main"), "base: expected an object"),
        ("multi-swe-bench", without(MULTI, base={"ref": "main"}), r"field base\.sha: expected a text"),
        ("multi-swe-bench", without(MULTI, number="2209"), "number: expected a whole number; found '2209'"),
        ("multi-swe-bench", without(MULTI, org="unknown"), "repo: expected one that multi-swe-bench knows"),
        ("multi-swe-bench", without(MULTI, number_interval="x_2_to_1"), "repo: expected one that multi-swe-bench"),
        ("multi-swe-bench", without(MULTI, number=True), "number: expected a whole number"),
        ("multi-swe-bench", without(MULTI, org="../x"), "org: expected a name of letters"),
        ("multi-swe-bench", without(MULTI, repo=".."), "repo: expected a name of letters"),
        ("multi-swe-bench", without(MULTI, f2p_tests=["b"]), "f2p_tests: expected an object from test names"),
        ("multi-swe-bench", without(MULTI, f2p_tests={}), "f2p_tests: expected at least one test"),
        ("multi-swe-bench", without(MULTI, resolved_issues=[]), "resolved_issues: expected a list of issues"),
        ("multi-swe-bench", without(MULTI, test_patch=["x"]), "test_patch: expected a text"),
        ("multi-swe-bench", without(MULTI, tag="a\0b"), "tag: expected JSON without NUL"),
        ("multi-swe-bench", without(MULTI, lang={"a": ["\0"]}), "lang: expected JSON without NUL"),
        ("multi-swe-bench", without(MULTI, tag={"a": "b"}), "tag: expected a text"),
        ("swe-bench-live", without(PYTHON, log_parser="cargo"), "log_parser: expected pytest, or a Python program"),
        ("swe-bench-live", without(PYTHON, log_parser=7), "log_parser: expected a text"),
        ("swe-bench-live", without(RUST, docker_image="a/sweb.eval.win.a_1776_b-1"), "image for Linux"),
        ("swe-bench-pro", without(PRO, fail_to_pass="__import__('os').system('x')"), "fail_to_pass: expected a list"),
        ("swe-bench-pro", without(PRO, fail_to_pass="(" * 5000), "fail_to_pass: expected a list"),
        ("swe-bench-pro", without(PRO, selected_test_files_to_run="{'a': 1}"), "files_to_run: expected a list"),
        ("swe-bench-pro", without(PRO, before_repo_set_cmd=["a"]), "before_repo_set_cmd: expected a text"),
        ("swe-bench-pro", without(PRO, requirements=7), "requirements: expected a text"),
    ],
)  # fmt: skip
def test_what_the_rules_do_not_say_is_refused_by_name(
    dataset: str, row: dict[str, Any], complaint: str, beside: Path
) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read(dataset, row, beside)
