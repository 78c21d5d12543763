"""SWE-Flow, SWE-Gym, SWE-rebench and SWE-smith: rows of Python, and of more languages in SWE-rebench's second version.

Columns: Hambaobao/SWE-Flow-Bench, sweflow_bench/utils/data.py and run_evaluation.py; the dataset cards SWE-Gym/SWE-Gym,
nebius/SWE-rebench, nebius/SWE-rebench-V2, SWE-bench/SWE-smith; SWE-Gym's fork of SWE-bench at 242429c1; swesmith 0.0.9,
harness/gather.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.agents import FrameworkOptions, agent_named
from app.agents.base import AgentJob
from app.agents.installation import Installer
from app.datasets.rows import ADAPTERS
from app.datasets.rows.swe_gym import VERSIONS
from app.datasets.source import DatasetArgument, recognised
from app.errors import DatasetInvalid, DatasetUnknown
from app.models.spec import JudgeName, Limits, PatchSolution
from tests.unit.folder_shell import FolderShell, committed, git
from tests.unit.row_reading import CLASSIC, PATCH, SHA, bash, goal_of, read, without

# --- SWE-Flow --------------------------------------------------------------------------------------------------------

FLOW: dict[str, Any] = {
    "instance_id": "httpkit-001", "repo": "SWE-Flow/httpkit", "problem_statement": "Write the parser of headers.",
    "base_commit": SHA, "reference_commit": "b" * 40, "patch": PATCH, "docker_image": "sweflow/httpkit:latest",
    "FAIL_TO_PASS": ["tests/test_a.py::test_one[a b]"], "PASS_TO_PASS": ["tests/test_a.py::test_two"],
}  # fmt: skip


def test_the_named_tests_must_pass_in_one_run_of_pytest() -> None:
    task = read("swe-flow", FLOW)
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
    for command in read("swe-flow", without(FLOW, base_commit=base)).environment.setup:
        done = bash(command.replace("/testbed", str(testbed)).replace("/workspace", str(tmp_path / "work")), tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "value.py").read_text() == "value = 1\n"
    assert git(tmp_path / "work", "rev-parse", "HEAD").strip() == base


# --- SWE-Gym ---------------------------------------------------------------------------------------------------------

MOTO = without(
    CLASSIC, "environment_setup_commit", repo="getmoto/moto", instance_id="getmoto__moto-5752", version="4.0",
    FAIL_TO_PASS=["tests/test_one.py::test_a"], PASS_TO_PASS=[],
)  # fmt: skip
MYPY = without(
    MOTO, repo="python/mypy", instance_id="python__mypy-10308", version="0.820",
    test_patch="diff --git a/test-data/a.test b/test-data/a.test\n--- a/test-data/a.test\n+++ b/test-data/a.test\n"
    "@@ -1 +1,3 @@\n a\n+[case testOne]\n+[case testTwo]\n",
    FAIL_TO_PASS=["mypy/test/testcheck.py::TypeCheckSuite::testOne"],
)  # fmt: skip


def test_a_row_has_its_own_image_and_the_fork_s_commands() -> None:
    task = read("swe-gym", MOTO)
    goal = goal_of(task)
    assert task.environment.image == "docker.io/xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"
    assert (task.environment.workdir, goal.judge, goal.log_parser) == (
        "/testbed", JudgeName.SWEBENCH_5, "parse_log_pytest",
    )  # fmt: skip
    assert goal.install_command.endswith("conda activate testbed\nmake init")
    assert goal.test_command.endswith("conda activate testbed\npytest -n0 -rA tests/test_one.py")
    assert task.environment.env["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")


def test_repositories_are_tested_in_ways_of_their_own_and_found_whatever_their_case() -> None:
    assert goal_of(read("swe-gym", MYPY)).test_command.endswith("pytest -n0 -rA -k 'testOne or testTwo'")
    pydantic = goal_of(read("swe-gym", without(MOTO, repo="pydantic/pydantic", version="2.0")))
    assert (pydantic.judge, pydantic.log_parser) == (JudgeName.OWN, "swe-gym-pydantic")
    monai = without(MOTO, repo="Project-MONAI/MONAI", instance_id="Project-MONAI__MONAI-1", version="0.6")
    task = read("swe-gym", monai)
    assert task.environment.image == "docker.io/xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1:latest"
    assert "python setup.py develop;" in goal_of(task).install_command
    conan = without(MOTO, repo="conan-io/conan", instance_id="conan-io__conan-1", version="1.59")
    assert (
        "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)\npytest -n0 -rA tests/"
        in goal_of(read("swe-gym", conan)).test_command
    )


def test_each_version_has_its_commands_once() -> None:
    for repository, groups in VERSIONS.items():
        versions = [version for group in groups for version in group.versions.split()]
        assert len(versions) == len(set(versions)), repository
        assert all(group.test.startswith("pytest ") and group.install for group in groups)


def test_its_rows_without_a_name_are_told_its_name_first(tmp_path: Path) -> None:
    file = tmp_path / "gym.jsonl"
    file.write_text(json.dumps(MOTO))
    with pytest.raises(DatasetUnknown, match=rf"name it: swe-gym\S*={file}"):
        recognised(DatasetArgument(str(file)), file, ADAPTERS)


# --- SWE-rebench -----------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "install": "pip install -e .[dev]", "log_parser": "parse_log_pytest", "no_use_env": None,
    "packages": "requirements.txt",
    "pip_packages": ["pytest"], "pre_install": None, "python": "3.9", "reqs_path": ["requirements.txt"],
    "test_cmd": "pytest --no-header -rA --tb=line --color=no",
}  # fmt: skip
V1 = without(
    CLASSIC, repo="oemof/tespy", instance_id="oemof__tespy-653", version="0.8", install_config=CONFIG,
    FAIL_TO_PASS=["tests/test_one.py::test_a"], PASS_TO_PASS=[], meta={"is_lite": True}, license_name="MIT",
)  # fmt: skip
V2 = without(
    CLASSIC, "environment_setup_commit", "version", repo="Unidata/netcdf-c", instance_id="unidata__netcdf-c-1925",
    pr_description="Add tests", language="c", image_name="docker.io/swerebenchv2/unidata-netcdf-c:1925-ad6bff3",
    FAIL_TO_PASS=["tst_filter.sh"], PASS_TO_PASS=["tst_v2"], created_at=1609298073000,
    install_config={"install": ["./bootstrap"], "log_parser": "parse_log_jq", "log_parsers": None,
                    "test_cmd": ["make check"]},
)  # fmt: skip


def test_a_row_of_the_first_version_is_tested_by_its_own_specification() -> None:
    task = read("swe-rebench", V1)
    goal = goal_of(task)
    assert task.environment.image == "docker.io/swerebench/sweb.eval.x86_64.oemof_1776_tespy-653:latest"
    assert (goal.judge, goal.log_parser, task.environment.workdir) == (
        JudgeName.SWEBENCH_5, "parse_log_pytest", "/testbed",
    )  # fmt: skip
    assert goal.install_command.endswith("conda activate testbed\npip install -e .[dev]")
    assert goal.test_command.endswith("\npytest --no-header -rA --tb=line --color=no tests/test_one.py")


def test_a_specification_may_prepare_the_shell_and_install_nothing_and_be_json_in_a_text() -> None:
    assert read("swe-rebench", without(V1, install_config=json.dumps(CONFIG))).goal == read("swe-rebench", V1).goal
    row = without(V1, install_config={**CONFIG, "install": None, "eval_commands": ["export A=1"]})
    goal = goal_of(read("swe-rebench", row))
    assert goal.install_command == ""
    assert "conda activate testbed\nexport A=1\npytest" in goal.test_command


@pytest.mark.parametrize("column", ["docker_image", "image_name"])
def test_a_row_s_own_image_is_taken(column: str) -> None:
    assert read("swe-rebench", without(V1, **{column: "example.org/own:1"})).environment.image == "example.org/own:1"


def test_a_row_of_the_second_version_lies_in_the_folder_of_its_repository() -> None:
    task = read("swe-rebench-v2", V2)
    goal = goal_of(task)
    assert (task.environment.image, task.environment.workdir) == (V2["image_name"], "/netcdf-c")
    assert (goal.judge, goal.log_parser) == (JudgeName.SWEBENCH_5, "parse_log_jq")
    assert (goal.install_command, goal.test_command) == ("", "set -e\nmake check")  # no conda, no names of files
    assert task.environment.env == {}


def test_durations_are_no_part_of_a_test_s_name_in_the_second_version() -> None:
    names = [
        "it works (12 ms)",
        "it works (1.2s)",
        "a [1.34 ms]",
        "b (2s) [ 3 MS ]",
        "t in 29.08 msec of x",
        "(3 s) kept",
    ]
    goal = goal_of(read("swe-rebench-v2", without(V2, FAIL_TO_PASS=names, PASS_TO_PASS=["c in 1 sec"])))
    assert goal.fail_to_pass == ("it works", "a", "b", "t of x", "(3 s) kept")
    assert goal.pass_to_pass == ("c",)
    assert goal.row["left_out_of_names"]


# --- SWE-smith -------------------------------------------------------------------------------------------------------

SMITH_ID = "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc"
BUG = (
    "diff --git a/oauthlib/tokens.py b/oauthlib/tokens.py\n--- a/oauthlib/tokens.py\n+++ b/oauthlib/tokens.py\n"
    "@@ -1 +1 @@\n-answer = 42\n+answer = 41\n"
)
SMITH: dict[str, Any] = {
    "instance_id": SMITH_ID, "repo": "swesmith/oauthlib__oauthlib.1fd52536", "patch": BUG, "created_at": "2025-05-01",
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
    git(folder, "checkout", "-q", "-b", SMITH_ID)
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
    task = read("swe-smith", SMITH)
    goal = goal_of(task)
    assert task.solution == PatchSolution(patch=BUG, reverse=True)
    assert task.environment.image == SMITH["image_name"]
    assert (goal.judge, goal.base_commit, goal.test_patch) == (JudgeName.SWESMITH, SMITH_ID, "")
    assert goal.row == {"instance_id": SMITH_ID, "repo": SMITH["repo"]}
    assert task.environment.env["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")


def test_the_environment_begins_at_the_task_s_branch_without_the_failing_tests(repository: FolderShell) -> None:
    [setup] = read("swe-smith", SMITH).environment.setup
    folder = repository.path("/testbed")
    done = bash(setup, folder)
    assert done.returncode == 0, done.stderr
    assert git(folder, "rev-parse", "HEAD") == git(folder, "rev-parse", goal_of(read("swe-smith", SMITH)).base_commit)
    assert not (folder / "tests" / "test_tokens.py").exists()
    assert (folder / "oauthlib" / "tokens.py").read_text() == "answer = 41\n"
    [other] = read("swe-smith", without(SMITH, instance_id="oauthlib__oauthlib.1fd52536.other")).environment.setup
    assert bash(other, folder).returncode != 0, "an image without the branch is a failed set-up"


@pytest.mark.parametrize("answered", [True, False])
def test_the_reverse_solves_it_and_nothing_else_does(repository: FolderShell, tmp_path: Path, answered: bool) -> None:
    task = read("swe-smith", SMITH)
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


# --- All of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "row", "complaint"),
    [
        ("swe-gym", without(MOTO, repo="psf/requests"), "repo: expected one of .*getmoto/moto.*; found 'psf/requests'"),
        ("swe-gym", without(MOTO, version="9.9"), "version: expected one of getmoto/moto that .*5.0; found '9.9'"),
        ("swe-gym", without(MOTO, repo="spyder-ide/spyder"), "repo: expected one of"),
        ("swe-gym", without(MYPY, test_patch="diff --git a/x b/x\n"), "test_patch: expected a patch of test files"),
        ("swe-gym", without(MOTO, "version", "base_commit"), "base_commit, version: expected the columns of swe-gym"),
        ("swe-rebench", without(V1, install_config="pytest"), "install_config: expected an object"),
        ("swe-rebench", without(V1, install_config='["pytest"]'), "install_config: expected an object"),
        ("swe-rebench", without(V1, install_config={**CONFIG, "test_cmd": ["a"]}), r"\.test_cmd: expected a"),
        ("swe-rebench", without(V1, install_config={**CONFIG, "log_parser": "parse_log_x"}), r"\.log_parser: exp"),
        ("swe-rebench", without(V1, pr_description="x"), "pr_description: .*swe-rebench-v2=PATH"),
        ("swe-rebench-v2", without(V2, install_config={"test_cmd": []}), r"\.(log_parser|test_cmd): expected"),
        ("swe-rebench-v2", without(V2, repo="netcdf-c"), "repo: expected a repository as owner/name"),
        ("swe-rebench-v2", without(V2, repo="a/.."), "repo: expected a repository as owner/name"),
        (
            "swe-smith",
            without(SMITH, repo="swesmith/nobody__nothing.12345678", instance_id="nobody__nothing.12345678.lm__1"),
            "field repo: expected one that swesmith knows",
        ),
        (
            "swe-smith",
            without(SMITH, repo="swesmith/pallets__click.fde47b4b"),
            f"field repo: expected 'swesmith/oauthlib__oauthlib.1fd52536', which the id '{SMITH_ID}' names",
        ),
        (
            "swe-smith",
            without(SMITH, instance_id="oauthlib"),
            "field repo: expected 'swesmith/oauthlib', which the id 'oauthlib' names",
        ),
        ("swe-smith", without(SMITH, repo="oauthlib/oauthlib"), "field repo: expected a repository of swesmith/"),
        ("swe-smith", without(SMITH, FAIL_TO_PASS=["a\nb"]), "field FAIL_TO_PASS: expected test names of one line"),
        ("swe-smith", without(SMITH, instance_id="$(reboot)"), "field instance_id: expected at most 200 letters"),
    ],
)  # fmt: skip
def test_what_the_rules_do_not_say_is_refused_by_name(dataset: str, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read(dataset, row)
