"""SWE-Gym. Columns: the dataset card SWE-Gym/SWE-Gym; commands: its fork of SWE-bench at 242429c1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.datasets.rows import ADAPTERS
from app.datasets.rows.swe_gym_versions import VERSIONS
from app.datasets.source import DatasetArgument, recognised
from app.errors import DatasetInvalid, DatasetUnknown
from app.models.spec import JudgeName
from tests.unit.row_reading import CLASSIC, goal_of, read, without

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


def test_mypy_is_tested_by_the_cases_that_the_patch_brings() -> None:
    assert goal_of(read("swe-gym", MYPY)).test_command.endswith("pytest -n0 -rA -k 'testOne or testTwo'")


def test_a_repository_is_found_whatever_its_case_and_has_its_own_environment() -> None:
    monai = without(MOTO, repo="Project-MONAI/MONAI", instance_id="Project-MONAI__MONAI-1", version="0.6")
    task = read("swe-gym", monai)
    assert task.environment.image == "docker.io/xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1:latest"
    assert "python setup.py develop;" in goal_of(task).install_command
    conan = without(MOTO, repo="conan-io/conan", instance_id="conan-io__conan-1", version="1.59")
    assert (
        "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)\npytest -n0 -rA tests/"
        in goal_of(read("swe-gym", conan)).test_command
    )


def test_pydantic_is_read_by_a_parser_of_its_own() -> None:
    pydantic = without(MOTO, repo="pydantic/pydantic", instance_id="pydantic__pydantic-1", version="2.0")
    goal = goal_of(read("swe-gym", pydantic))
    assert (goal.judge, goal.log_parser) == (JudgeName.OWN, "swe-gym-pydantic")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (without(MOTO, repo="psf/requests"), "field repo: expected one of .*getmoto/moto.*; found 'psf/requests'"),
        (without(MOTO, version="9.9"), "field version: expected one of getmoto/moto that SWE-Gym .*5.0; found '9.9'"),
        (without(MOTO, repo="spyder-ide/spyder"), "field repo: expected one of"),
        (without(MYPY, test_patch="diff --git a/x b/x\n"), "field test_patch: expected a patch of test files"),
        (without(MOTO, "version"), "field version: expected the columns of swe-gym"),
    ],
)  # fmt: skip
def test_a_repository_or_version_without_rules_is_refused_by_name(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read("swe-gym", row)


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


def test_all_columns_that_are_missing_are_named() -> None:
    with pytest.raises(DatasetInvalid, match="field base_commit, version: expected the columns of swe-gym"):
        read("swe-gym", without(MOTO, "version", "base_commit"))
