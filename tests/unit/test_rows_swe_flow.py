"""SWE-Flow. Columns and steps: Hambaobao/SWE-Flow-Bench, sweflow_bench/utils/data.py and run_evaluation.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import DatasetInvalid
from app.models.spec import JudgeName
from tests.unit.folder_shell import committed, git
from tests.unit.row_reading import PATCH, SHA, bash, goal_of, read, without

ROW: dict[str, Any] = {
    "instance_id": "httpkit-001", "repo": "SWE-Flow/httpkit", "problem_statement": "Write the parser of headers.",
    "base_commit": SHA, "reference_commit": "b" * 40, "patch": PATCH, "docker_image": "sweflow/httpkit:latest",
    "FAIL_TO_PASS": ["tests/test_a.py::test_one[a b]"], "PASS_TO_PASS": ["tests/test_a.py::test_two"],
}  # fmt: skip


def test_the_named_tests_must_pass_in_one_run_of_pytest() -> None:
    task = read("swe-flow", ROW)
    goal = goal_of(task)
    assert (task.environment.image, task.environment.workdir) == ("sweflow/httpkit:latest", "/workspace")
    assert (goal.judge, goal.test_patch, task.limits.grading_timeout_s) == (JudgeName.EXIT_CODE, "", 900.0)
    assert goal.test_command == "python -m pytest -v 'tests/test_a.py::test_one[a b]' tests/test_a.py::test_two"


def test_the_environment_is_a_copy_at_the_base_commit(tmp_path: Path) -> None:
    testbed = tmp_path / "testbed"
    testbed.mkdir()
    committed(testbed, {"value.py": "value = 1\n"})
    base = git(testbed, "rev-parse", "HEAD").strip()
    (testbed / "value.py").write_text("value = 2\n")
    git(testbed, "commit", "-qam", "the reference")
    for command in read("swe-flow", without(ROW, base_commit=base)).environment.setup:
        done = bash(command.replace("/testbed", str(testbed)).replace("/workspace", str(tmp_path / "work")), tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "value.py").read_text() == "value = 1\n"
    assert git(tmp_path / "work", "rev-parse", "HEAD").strip() == base


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (without(ROW, "docker_image"), "field docker_image: expected the columns of swe-flow"),
        (without(ROW, FAIL_TO_PASS={"a": 1}), "field FAIL_TO_PASS: expected a list of test names"),
        (without(ROW, FAIL_TO_PASS=[], PASS_TO_PASS=[]), "field FAIL_TO_PASS: expected at least one test"),
        (without(ROW, base_commit="--upload-pack=x"), "base_commit"),
        (without(ROW, docker_image="Not An Image"), "image"),
    ],
)
def test_what_the_rules_do_not_say_is_refused_by_name(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read("swe-flow", row)
