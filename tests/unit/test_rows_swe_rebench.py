"""SWE-rebench, both versions. Columns: the dataset cards nebius/SWE-rebench and -V2, and its sample.json."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import DatasetInvalid
from app.models.spec import JudgeName
from tests.unit.row_reading import CLASSIC, goal_of, read, without

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


def test_a_specification_as_a_json_string_means_the_same() -> None:
    row = without(V1, install_config=json.dumps(CONFIG))
    assert read("swe-rebench", row).goal == read("swe-rebench", V1).goal


def test_a_specification_may_prepare_the_shell_and_install_nothing() -> None:
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


@pytest.mark.parametrize(
    ("dataset", "row", "complaint"),
    [
        ("swe-rebench", without(V1, install_config="pytest"), "field install_config: expected an object"),
        ("swe-rebench", without(V1, install_config=["pytest"]), "field install_config: expected an object"),
        ("swe-rebench", without(V1, install_config='["pytest"]'), "field install_config: expected an object"),
        ("swe-rebench", without(V1, install_config={**CONFIG, "test_cmd": ["a"]}), r"\.test_cmd: expected a"),
        ("swe-rebench", without(V1, install_config={**CONFIG, "log_parser": "parse_log_x"}), r"\.log_parser: exp"),
        ("swe-rebench", without(V1, "install_config"), "field install_config: expected the columns of swe-rebench"),
        ("swe-rebench", without(V1, pr_description="x"), "field pr_description: .*swe-rebench-v2=PATH"),
        ("swe-rebench-v2", without(V2, "image_name"), "field image_name: expected the columns of swe-rebench-v2"),
        ("swe-rebench-v2", without(V2, install_config={"test_cmd": []}), r"\.(log_parser|test_cmd): expected"),
        ("swe-rebench-v2", without(V2, repo="netcdf-c"), "field repo: expected a repository as owner/name"),
        ("swe-rebench-v2", without(V2, repo="a/.."), "field repo: expected a repository as owner/name"),
    ],
)  # fmt: skip
def test_what_the_rules_do_not_say_is_refused_by_name(dataset: str, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read(dataset, row)
