"""SWE-bench and SWE-bench Multilingual. Columns as published on their dataset cards, classic and since 5.0."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import DatasetInvalid
from app.models.spec import EnvironmentKind, JudgeName, Network, PatchSolution
from tests.unit.row_reading import CLASSIC, PATCH, SHA, TEST_PATCH, goal_of, read, without

# Source: swebench 5.0.2, harness/utils.py (make_test_spec): the columns that a row must have.
SCRIPTED: dict[str, Any] = {
    **CLASSIC, "image": "swebench/sweb.eval.x86_64.django_1776_django-13251:latest",
    "eval_script": "#!/bin/bash\nset -uxo pipefail\ngit apply …\n", "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}  # fmt: skip
REDIS = {**CLASSIC, "repo": "redis/redis", "instance_id": "redis__redis-10764", "version": "10764"}


def test_a_classic_row_has_the_commands_of_the_library() -> None:
    task = read("swe-bench", CLASSIC)
    goal = goal_of(task)
    assert (task.name, task.description) == ("django__django-13251", CLASSIC["problem_statement"])
    assert task.environment.image == "docker.io/swebench/sweb.eval.x86_64.django_1776_django-13251:latest"
    assert (task.environment.workdir, task.environment.network) == ("/testbed", Network.NONE)
    assert task.environment.env["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")
    assert (goal.judge, goal.log_parser) == (JudgeName.SWEBENCH_4, "parse_log_django")
    assert (goal.base_commit, goal.test_patch) == (SHA, TEST_PATCH)
    assert goal.row == {"instance_id": "django__django-13251", "repo": "django/django", "version": "3.2"}
    assert goal.fail_to_pass == ("test_a (queries.tests.One)",)
    assert goal.pass_to_pass == ("test_b (queries.tests.One)",)
    assert task.solution == PatchSolution(patch=PATCH)
    without_a_container = read("swe-bench", CLASSIC, kind=EnvironmentKind.LOCAL)
    assert without_a_container.environment.env == {}, "no path is set"


def test_the_package_is_installed_again_between_the_patch_and_the_tests() -> None:
    goal = goal_of(read("swe-bench", CLASSIC))
    assert goal.install_command.endswith("export LC_ALL=en_US.UTF-8\npython -m pip install -e .")
    assert goal.test_command.startswith("source /opt/miniconda3/bin/activate\nconda activate testbed\n")
    assert goal.test_command.endswith("--parallel 1 test_one")
    assert "pip install" not in goal.test_command


def test_a_language_without_conda_keeps_the_path_of_its_image() -> None:
    task = read("swe-bench-multilingual", REDIS)
    assert goal_of(task).log_parser == "parse_log_redis"
    assert (goal_of(task).install_command, task.environment.env) == ("", {})
    assert goal_of(task).build_command == "cd /testbed\nmake distclean\nmake"


def test_a_row_that_brings_its_script_lays_out_its_tests_itself() -> None:
    task = read("swe-bench", SCRIPTED)
    goal = goal_of(task)
    assert task.environment.image == SCRIPTED["image"]
    assert (goal.judge, goal.log_parser) == (JudgeName.SWEBENCH_5, "parse_log_pytest")
    assert (goal.test_patch, goal.install_command, goal.test_command) == (
        "",
        "",
        f"{SCRIPTED['eval_script']}# its exit code",
    )
    assert goal.row["eval_type"] == "pass_and_fail"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (without(CLASSIC, repo="nobody/nothing"), "field repo: expected one that swebench-4 knows; found .*nothing"),
        (without(CLASSIC, version="99"), "field version: expected one that swebench-4 knows; found '99'"),
        (without(CLASSIC, repo="a/b"), "field repo: expected one that swebench-4 knows; found 'a/b'"),
        (without(CLASSIC, "version"), "field version: expected a text that is not empty"),
        (without(CLASSIC, version=3.2), "field version: expected a text that is not empty; found 3.2"),
        (without(CLASSIC, test_patch=""), "field test_patch: expected a text"),
        (without(SCRIPTED, "log_parser"), "field log_parser: expected all of image, eval_script"),
        (without(SCRIPTED, log_parser="parse_log_cobol"), "field log_parser: expected one that swebench-5 knows"),
        (without(SCRIPTED, eval_script=7), "field eval_script: expected a text"),
        (without(SCRIPTED, eval_type="maybe"), "field eval_type: expected one of pass_and_fail, fail_only"),
        (without(SCRIPTED, image_assets='{"test_patch": []}'), "field image_assets: .*pictures"),
        (without(CLASSIC, install_config={"test_cmd": "x"}), "field install_config: .*swe-rebench=PATH"),
        (without(CLASSIC, docker_image="x:1"), "field docker_image: expected no such column"),
    ],
)  # fmt: skip
def test_what_the_rules_do_not_say_is_refused_by_name(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read("swe-bench", row)
