"""Multi-SWE-bench and Multi-SWE-RL. Columns: multi-swe-bench 1.1.2, harness/dataset.py and what it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.datasets.row_doubts import doubt
from app.datasets.row_files import RawRow
from app.errors import DatasetInvalid
from app.models.spec import JudgeName, PatchSolution
from tests.unit.row_reading import PATCH, SHA, TEST_PATCH, goal_of, read, without


def result(passed: list[str], failed: list[str]) -> dict[str, Any]:
    return {
        "passed_count": len(passed), "failed_count": len(failed), "skipped_count": 0,
        "passed_tests": passed, "failed_tests": failed, "skipped_tests": [],
    }  # fmt: skip


ROW: dict[str, Any] = {
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
    task = read(dataset, ROW)
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


def test_the_judge_gets_the_runs_to_compare_with_and_no_answer() -> None:
    row = goal_of(read("multi-swe-bench", ROW)).row
    assert (row["org"], row["number"], row["run_result"]) == ("BurntSushi", 2209, ROW["run_result"])
    assert row["test_patch_result"] == ROW["test_patch_result"]
    assert not {"fix_patch", "fix_patch_result", "body"} & row.keys()


def test_the_answer_that_the_image_holds_is_taken_away() -> None:
    assert read("multi-swe-bench", ROW).environment.setup == ("rm -f /home/fix.patch /home/test.patch",)


def test_a_numbered_row_is_of_the_images_that_the_package_names() -> None:
    more = {"number_interval": "ripgrep_2209_to_1000"}
    task = read("multi-swe-rl", {**ROW, **more})
    assert task.environment.image == "docker.io/envagent/burntsushi_m_ripgrep:pr-2209"
    assert goal_of(task).row.items() >= more.items()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (without(ROW, "run_result"), "field run_result: expected the columns of multi-swe-bench"),
        (without(ROW, run_result=[]), "field run_result: expected an object"),
        (without(ROW, run_result=result(["a"], []) | {"passed_count": 7}), "passed_count: expected 1, as many"),
        (without(ROW, base="main"), "field base: expected an object"),
        (without(ROW, base={"ref": "main"}), r"field base\.sha: expected a text"),
        (without(ROW, number="2209"), "field number: expected a whole number; found '2209'"),
        (without(ROW, org="nobody"), "field repo: expected one that multi-swe-bench knows"),
        (without(ROW, number_interval="x_2_to_1"), "field repo: expected one that multi-swe-bench knows"),
        (without(ROW, number=True), "field number: expected a whole number"),
        (without(ROW, org="../x"), "field org: expected a name of letters"),
        (without(ROW, repo=".."), "field repo: expected a name of letters"),
        (without(ROW, f2p_tests=["b"]), "field f2p_tests: expected an object from test names"),
        (without(ROW, f2p_tests={}), "field f2p_tests: expected at least one test"),
        (without(ROW, resolved_issues=[]), "field resolved_issues: expected a list of issues"),
        (without(ROW, test_patch=["x"]), "field test_patch: expected a text"),
        (without(ROW, tag="a\0b"), "field tag: expected JSON without NUL"),
        (without(ROW, lang={"a": ["\0"]}), "field lang: expected JSON without NUL"),
        (without(ROW, tag={"a": "b"}), "field tag: expected a text"),
    ],
)  # fmt: skip
def test_what_the_rules_do_not_say_is_refused_by_name(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read("multi-swe-bench", row)


def test_lint_names_an_id_of_another_number_and_a_patch_of_tests_as_the_answer() -> None:
    def said(**changes: object) -> str:
        raw = RawRow(Path("rows.jsonl"), 1, {**ROW, **changes})
        return str(doubt(raw, read("multi-swe-bench", raw.values), {}))

    assert said() == "None"
    assert said(instance_id="BurntSushi__ripgrep-2209") == "None"
    number = "field number: expected the number that the id 'BurntSushi__ripgrep-2210' ends with; found 2209"
    assert number in said(instance_id="BurntSushi__ripgrep-2210")
    assert "field test_patch: expected another patch than that in fix_patch" in said(fix_patch=TEST_PATCH)
