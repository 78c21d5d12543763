"""Users' own rows, and the demo's: SWE-bench's columns with a test command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.artifacts.bundles import pack
from app.datasets.base import Reading
from app.errors import DatasetInvalid
from app.models.spec import Bundle, EnvironmentKind, JudgeName, Network, PatchSolution, Reach, Reuse
from tests.unit.dataset_adapters import load, write
from tests.unit.row_reading import CLASSIC, PATCH, TEST_PATCH, goal_of, read, without
from tests.unit.task_folders import files

ROW = without(
    CLASSIC, "environment_setup_commit", "version", repo="psf/requests", instance_id="psf__requests-1",
    FAIL_TO_PASS='["tests/test_one.py::test_a[x y]"]', PASS_TO_PASS=["tests/test_one.py::test_b"],
    test_cmd="make test", image_name="example.org/own:1",
)  # fmt: skip


def test_a_row_is_tested_by_its_own_command_and_nothing_is_added() -> None:
    task = read("own", ROW)
    goal = goal_of(task)
    assert (task.environment.image, task.environment.workdir) == ("example.org/own:1", "/testbed")
    assert (task.environment.env, task.environment.setup, task.environment.network) == ({}, (), Network.NONE)
    assert (goal.test_command, goal.test_patch, goal.install_command) == ("make test", TEST_PATCH, "")
    assert (goal.judge, goal.log_parser) == (JudgeName.OWN, "pytest")
    assert goal.fail_to_pass == ("tests/test_one.py::test_a[x y]",)
    assert task.solution == PatchSolution(patch=PATCH)
    more = goal_of(read("own", without(ROW, test_cmd=["a", "b"], log_parser="parse_log_cargo")))
    assert (more.test_command, more.judge, more.log_parser) == ("a\nb", JudgeName.SWEBENCH_5, "parse_log_cargo")


@pytest.mark.parametrize("column", ["image_name", "docker_image", "image"])
def test_a_row_names_its_image_and_its_working_folder(column: str) -> None:
    environment = read("own", {**ROW, "image_name": None, "workdir": "/workspace", column: "x:1"}).environment
    assert (environment.image, environment.workdir) == ("x:1", "/workspace")


def test_an_image_may_be_built_from_a_folder_beside_the_rows_which_is_stored_once(tmp_path: Path) -> None:
    files(tmp_path, {"images/one/Dockerfile": "FROM scratch\n"})
    row = without(ROW, "image_name", build_context="images/one")
    write(tmp_path / "rows.jsonl", [{**row, "instance_id": f"a__b-{number}"} for number in range(2)])
    stored: list[Path] = []

    def note(folder: Path) -> Bundle:
        stored.append(folder)
        return pack(folder)[0]

    tasks = load(str(tmp_path), Reading(pack=note, kind=EnvironmentKind.LOCAL))
    assert stored == [tmp_path.resolve() / "images/one"]
    assert [task.environment.kind for task in tasks] == [EnvironmentKind.LOCAL] * 2
    assert all(task.environment.build and task.environment.image is None for task in tasks)


def test_a_row_says_of_its_environment_what_the_schema_has_no_words_for() -> None:
    words = {"setup": ["make"], "reuse": "shared-readonly", "network": "model-only", "storage_mb": 256}
    found = read("own", without(ROW, megaflow=words)).environment
    assert (found.setup, found.reuse, found.network) == (("make",), Reuse.SHARED_READONLY, Network.MODEL_ONLY)
    assert found.resources.disk_bytes == 256 << 20


@pytest.mark.parametrize(
    ("said", "grading"),
    [
        ({}, Reach()),
        ({"network": "model-only"}, Reach()),
        ({"network": "open"}, Reach(network=Network.OPEN)),
        ({"allowed_hosts": ["a.example"]}, Reach(network=Network.ALLOWLIST, allowed_hosts=("a.example",))),
    ],
)
def test_a_grader_reaches_what_its_row_says_and_else_nothing(said: dict[str, Any], grading: Reach) -> None:
    assert read("own", without(ROW, megaflow=said)).environment.grading == grading


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"instance_id": ""}, "field instance_id: expected a text that is not empty; found ''"),
        ({"instance_id": "../x"}, "field instance_id: expected at most 200 letters"),
        ({"instance_id": "a/../x"}, "field instance_id: expected at most 200 letters"),
        ({"problem_statement": None}, "field problem_statement: expected a value, as every row of own has one"),
        ({"problem_statement": " "}, "field problem_statement: expected a text that is not empty"),
        ({"base_commit": 7}, "field base_commit: expected a text that is not empty; found 7"),
        ({"base_commit": "--upload-pack=x"}, "field base_commit"),
        ({"patch": "a\0b"}, "NUL"),
        ({"patch": ["x"]}, "field patch: expected a patch as text"),
        ({"FAIL_TO_PASS": "test_a"}, "field FAIL_TO_PASS: expected a list of test names.*; found 'test_a'"),
        ({"FAIL_TO_PASS": '{"a": 1}'}, "field FAIL_TO_PASS: expected a list of test names"),
        ({"FAIL_TO_PASS": [["a"]]}, "field FAIL_TO_PASS: expected a list of test names"),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": "[]"}, "at least one test"),
        ({"test_patch": ["x"]}, "field test_patch: expected a patch as text"),
        ({"test_cmd": [1]}, "field test_cmd: expected a command"),
        ({"test_cmd": []}, "field test_cmd: expected a command"),
        ({"test_cmds": ["x"]}, "field test_cmds: expected no such column"),
        ({"eval_script": "x"}, "field eval_script: expected no such column"),
        ({"log_parser": "matplotlib"}, "field log_parser: expected one of pytest, or parse_log_"),
        ({"log_parser": "parse_log_cobol"}, "field log_parser: expected one that swebench-5 knows"),
        ({"log_parser": "django"}, "field log_parser: expected one of pytest, or parse_log_"),
        ({"log_parser": 7}, "field log_parser: expected a text"),
        ({"image_name": None}, "field image_name: expected an image here, or a folder with a Dockerfile"),
        ({"image_name": "-v/:/host"}, "image"),
        ({"image_name": None, "build_context": "nowhere"}, "field build_context: expected a folder below"),
        ({"image_name": None, "build_context": "../.."}, "field build_context: expected a folder below"),
        ({"image_name": None, "build_context": "a\0b"}, "field build_context: .*without NUL"),
        ({"build_context": "images"}, "field build_context: expected nothing beside image_name: .*named or built"),
        ({"PASS_TO_PASS": ["b", "tests/test_one.py::test_a[x y]"]}, "FAIL_TO_PASS: .*in both: 'tests/test_one"),
        ({"patch": "fix the bug"}, "field patch: expected a diff, with"),
        ({"test_patch": "@@ -1 +1 @@"}, "field test_patch: expected a diff, with"),
        ({"workdir": 3}, "field workdir: expected a text"),
        ({"megaflow": {"set_up": ["make"]}}, r"field megaflow.set_up: expected one of setup, reuse, netw"),
        ({"megaflow": ["make"]}, "field megaflow: expected a map with any of setup, reuse"),
        ({"megaflow": {"network": "vpn"}}, "megaflow.network: expected 'none', 'model-only'"),
        ({"megaflow": {"network": "allowlist"}}, "expected `allowed_hosts` with the network `allowlist`"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_field(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint) as caught:
        read("own", {**ROW, **changes}, tmp_path)
    assert str(caught.value).startswith("rows.jsonl, row 1")


def test_a_recipe_outside_of_the_rows_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(DatasetInvalid, match="field build_context: expected a folder below"):
        read("own", without(ROW, "image_name", build_context=".."), tmp_path / "rows")
