"""SWE-smith. Columns: the dataset card SWE-bench/SWE-smith; branches and commits: swesmith 0.0.9, harness/gather.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.agents import FrameworkOptions, agent_named
from app.agents.base import AgentJob
from app.agents.installation import Installer
from app.errors import DatasetInvalid
from app.models.spec import JudgeName, Limits, PatchSolution
from tests.unit.folder_shell import FolderShell, committed, git
from tests.unit.row_reading import bash, goal_of, read, without

ID = "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc"
BUG = (
    "diff --git a/oauthlib/tokens.py b/oauthlib/tokens.py\n--- a/oauthlib/tokens.py\n+++ b/oauthlib/tokens.py\n"
    "@@ -1 +1 @@\n-answer = 42\n+answer = 41\n"
)
ROW: dict[str, Any] = {
    "instance_id": ID, "repo": "swesmith/oauthlib__oauthlib.1fd52536", "patch": BUG, "created_at": "2025-05-01",
    "image_name": "swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536", "problem_statement": "Off by one.",
    "FAIL_TO_PASS": ["tests/test_tokens.py::test_answer"], "PASS_TO_PASS": ["tests/test_other.py::test_it"],
}  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> FolderShell:
    """An image's repository: main, and the task's branch with the bug and above it without the failing tests."""
    shell = FolderShell(tmp_path / "environment")
    folder = shell.path("/testbed")
    committed(
        folder,
        {
            "oauthlib/tokens.py": "answer = 42\n",
            "tests/test_tokens.py": "from oauthlib.tokens import answer\nassert answer == 42\n",
            "tests/test_other.py": "assert True\n",
        },
    )
    main = git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip()
    git(folder, "checkout", "-q", "-b", ID)
    (folder / "oauthlib" / "tokens.py").write_text("answer = 41\n")
    git(folder, "commit", "-qam", "Bug Patch")
    git(folder, "rm", "-q", "tests/test_tokens.py")
    git(folder, "commit", "-qm", "Remove F2P Tests")
    git(folder, "checkout", "-q", main)
    return shell


def solved(shell: FolderShell, tmp_path: Path, solution: PatchSolution) -> None:
    fields: dict[str, Any] = {
        "task_name": "t", "description": "d", "workdir": "/testbed", "limits": Limits(), "model": None,
        "solution": solution, "solution_files": None, "scratch": tmp_path,
    }  # fmt: skip

    class Never:
        def is_set(self) -> bool:
            return False

        def on_cancel(self, callback: Any) -> None:
            return None

    agent_named("oracle", FrameworkOptions(Installer(Path("/nowhere")))).run(AgentJob(**fields), shell, Never())  # type: ignore[arg-type]


def test_the_answer_is_the_reverse_of_the_patch() -> None:
    task = read("swe-smith", ROW)
    goal = goal_of(task)
    assert task.solution == PatchSolution(patch=BUG, reverse=True)
    assert task.environment.image == ROW["image_name"]
    assert (goal.judge, goal.base_commit, goal.test_patch) == (JudgeName.SWESMITH, ID, "")
    assert goal.row == {"instance_id": ID, "repo": ROW["repo"]}
    assert task.environment.env["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")


def test_the_environment_begins_at_the_task_s_branch_without_the_failing_tests(repository: FolderShell) -> None:
    [setup] = read("swe-smith", ROW).environment.setup
    folder = repository.path("/testbed")
    done = bash(setup, folder)
    assert done.returncode == 0, done.stderr
    assert git(folder, "rev-parse", "HEAD") == git(folder, "rev-parse", goal_of(read("swe-smith", ROW)).base_commit)
    assert not (folder / "tests" / "test_tokens.py").exists()
    assert (folder / "oauthlib" / "tokens.py").read_text() == "answer = 41\n"


def test_an_image_without_the_branch_is_a_failed_set_up(repository: FolderShell) -> None:
    [setup] = read("swe-smith", without(ROW, instance_id="oauthlib__oauthlib.1fd52536.other")).environment.setup
    assert bash(setup, repository.path("/testbed")).returncode != 0


@pytest.mark.parametrize("answered", [True, False])
def test_the_reverse_solves_it_and_nothing_else_does(repository: FolderShell, tmp_path: Path, answered: bool) -> None:
    task = read("swe-smith", ROW)
    folder = repository.path("/testbed")
    assert bash(task.environment.setup[0], folder).returncode == 0
    if answered:
        assert isinstance(task.solution, PatchSolution)
        solved(repository, tmp_path, task.solution)
    (folder / "tests" / "test_other.py").write_text("assert False\n")  # whatever became of the visible tests
    restore = goal_of(task).test_command.removesuffix("source /opt/miniconda3/bin/activate; conda activate testbed;"
                                                      " pytest --verbose")  # fmt: skip
    tests = "python3 -c 'import sys; sys.path.insert(0, \".\"); exec(open(sys.argv[1]).read())' tests/test_{}.py"
    done = bash(f"{restore}\n{tests.format('other')} && {tests.format('tokens')}", folder)
    assert (done.returncode == 0) is answered, done.stderr
    assert (folder / "tests" / "test_other.py").read_text() == "assert True\n"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            without(ROW, repo="swesmith/nobody__nothing.12345678", instance_id="nobody__nothing.12345678.lm__1"),
            "field repo: expected one that swesmith knows",
        ),
        (
            without(ROW, repo="swesmith/pallets__click.fde47b4b"),
            f"field repo: expected 'swesmith/oauthlib__oauthlib.1fd52536', which the id '{ID}' names",
        ),
        (
            without(ROW, instance_id="oauthlib"),
            "field repo: expected 'swesmith/oauthlib', which the id 'oauthlib' names",
        ),
        (without(ROW, repo="oauthlib/oauthlib"), "field repo: expected a repository of swesmith/"),
        (without(ROW, "image_name"), "field image_name: expected the columns of swe-smith"),
        (without(ROW, FAIL_TO_PASS=["a\nb"]), "field FAIL_TO_PASS: expected test names of one line"),
        (without(ROW, instance_id="$(reboot)"), "field instance_id: expected at most 200 letters"),
    ],
)
def test_what_the_rules_do_not_say_is_refused_by_name(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read("swe-smith", row)
