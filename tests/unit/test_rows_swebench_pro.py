"""SWE-bench Pro. Columns: the dataset card ScaleAI/SWE-bench_Pro; steps: scaleapi/SWE-bench_Pro-os."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.artifacts.bundles import pack
from app.datasets.base import Reading
from app.datasets.source import open_dataset
from app.errors import DatasetInvalid
from app.grading.reports import PARSERS
from app.models.outcome import TestStatus
from app.models.spec import JudgeName
from tests.unit.folder_shell import committed, git
from tests.unit.row_reading import PATCH, SHA, bash, goal_of, read, without

ID = f"instance_flipt-io__flipt-{'c' * 40}"
ROW: dict[str, Any] = {
    "instance_id": ID, "repo": "flipt-io/flipt", "base_commit": SHA, "patch": PATCH, "test_patch": PATCH,
    "problem_statement": "The cache forgets.", "requirements": "- It must not.", "interface": "None.",
    "repo_language": "go", "fail_to_pass": "['TestCache', 'TestIt/with \"quotes\"']", "pass_to_pass": '["TestOld"]',
    "before_repo_set_cmd": f"git reset --hard {SHA}\ngit clean -fd \ngit checkout {SHA} \ntouch laid-out",
    "selected_test_files_to_run": "['TestCache', 'TestIt/with \"quotes\"']",
    "dockerhub_tag": f"flipt-io.flipt-{ID[9:]}",
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
    scripts = tmp_path / "rows" / "run_scripts" / ID
    scripts.mkdir(parents=True)
    (scripts / "run_script.sh").write_text(RUN)
    (scripts / "parser.py").write_text(PARSER)
    return tmp_path / "rows"


def test_a_row_is_tested_by_the_scripts_beside_it(beside: Path) -> None:
    task = read("swe-bench-pro", ROW, beside)
    goal = goal_of(task)
    assert task.environment.image == f"docker.io/jefzda/sweap-images:{ROW['dockerhub_tag']}"
    assert task.environment.workdir == "/app"
    assert task.description == (
        "The cache forgets.\n\nRequirements:\n- It must not.\n\nNew interfaces introduced:\nNone."
    )
    assert (goal.judge, goal.log_parser, goal.test_patch) == (JudgeName.OWN, "swe-bench-pro", "")
    assert goal.fail_to_pass == ("TestCache", 'TestIt/with "quotes"')
    assert goal.pass_to_pass == ("TestOld",)
    assert goal.test_command.startswith("touch laid-out\n")


def test_the_command_lays_out_runs_and_reports(beside: Path, tmp_path: Path) -> None:
    goal = goal_of(read("swe-bench-pro", ROW, beside))
    command = goal.test_command.replace("/workspace", str(tmp_path / "workspace"))
    done = bash(command.replace("python ", "python3 "), tmp_path)
    assert 'said TestCache,TestIt/with "quotes"' in done.stdout
    assert PARSERS["swe-bench-pro"](done.stdout) == {"TestCache": TestStatus.PASSED, "TestOld": TestStatus.SKIPPED}
    assert done.returncode == 0


def test_a_parser_that_fails_reports_nothing_and_says_so(beside: Path, tmp_path: Path) -> None:
    (beside / "run_scripts" / ID / "parser.py").write_text("raise SystemExit(3)\n")
    command = goal_of(read("swe-bench-pro", ROW, beside)).test_command.replace("/workspace", str(tmp_path / "w"))
    done = bash(command.replace("python ", "python3 "), tmp_path)
    assert (done.returncode, PARSERS["swe-bench-pro"](done.stdout)) == (3, {})


def test_a_report_that_the_tests_print_themselves_is_not_read(beside: Path, tmp_path: Path) -> None:
    forged = 'echo ">>>>> Tests as JSON"; echo \'{"tests": [{"name": "TestIt", "status": "PASSED"}]}\'\n'
    (beside / "run_scripts" / ID / "run_script.sh").write_text(RUN + forged)
    command = goal_of(read("swe-bench-pro", ROW, beside)).test_command.replace("/workspace", str(tmp_path / "w"))
    done = bash(command.replace("python ", "python3 "), tmp_path)
    assert "TestIt" not in PARSERS["swe-bench-pro"](done.stdout)


def test_the_environment_begins_at_the_base_commit(tmp_path: Path, beside: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    committed(app, {"a": "1\n"})
    base = git(app, "rev-parse", "HEAD").strip()
    (app / "a").write_text("2\n")
    git(app, "commit", "-qam", "later")
    [setup] = read("swe-bench-pro", without(ROW, base_commit=base), beside).environment.setup
    assert bash(setup, app).returncode == 0
    assert (git(app, "rev-parse", "HEAD").strip(), (app / "a").read_text()) == (base, "1\n")


@pytest.mark.parametrize("folder", [None, Path("/nowhere")])
def test_a_row_without_its_scripts_is_refused_with_what_to_get(folder: Path | None) -> None:
    with pytest.raises(DatasetInvalid, match=r"run_scripts.*scaleapi/SWE-bench_Pro-os"):
        read("swe-bench-pro", ROW, folder)


def test_scripts_that_lie_elsewhere_are_not_read(beside: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the host's own")
    (beside / "run_scripts" / ID / "parser.py").unlink()
    (beside / "run_scripts" / ID / "parser.py").symlink_to(tmp_path / "secret")
    with pytest.raises(DatasetInvalid, match="link that leads out"):
        read("swe-bench-pro", ROW, beside)
    with pytest.raises(DatasetInvalid, match="field instance_id: expected at most 200 letters"):
        read("swe-bench-pro", without(ROW, instance_id="a/../../x"), beside)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (without(ROW, "dockerhub_tag"), "field dockerhub_tag: expected the columns of swe-bench-pro"),
        (without(ROW, fail_to_pass="__import__('os').system('x')"), "fail_to_pass: expected a list of test names"),
        (without(ROW, fail_to_pass="(" * 5000), "field fail_to_pass: expected a list of test names"),
        (without(ROW, selected_test_files_to_run="{'a': 1}"), "field selected_test_files_to_run: expected a list"),
        (without(ROW, before_repo_set_cmd=["a"]), "field before_repo_set_cmd: expected a text"),
        (without(ROW, requirements=7), "field requirements: expected a text"),
    ],
)  # fmt: skip
def test_what_the_rules_do_not_say_is_refused_by_name(row: dict[str, Any], complaint: str, beside: Path) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read("swe-bench-pro", row, beside)


def test_a_copy_takes_the_scripts_along(beside: Path, tmp_path: Path) -> None:
    (beside / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    copied = tmp_path / "copied"
    copied.mkdir()
    open_dataset(f"swe-bench-pro={beside / 'rows.jsonl'}", Reading(pack=lambda one: pack(one)[0])).copy({ID}, copied)
    (task,) = open_dataset(f"swe-bench-pro={copied / 'rows.jsonl'}", Reading(pack=lambda one: pack(one)[0])).tasks()
    assert task.name == ID
