"""Rows in the SWE-bench schema, as users have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.artifacts.bundles import pack
from app.datasets import load, swebench
from app.datasets.base import Reading
from app.errors import DatasetInvalid
from app.grading.reports import PARSERS
from app.models.spec import AgentTask, Bundle, EnvironmentKind, Network, PatchSolution, Reuse, TestsGoal

TEST_PATCH = """diff --git a/tests/queries/tests.py b/tests/queries/tests.py
--- a/tests/queries/tests.py
+++ b/tests/queries/tests.py
@@ -1 +1 @@
-a
+b
diff --git a/tests/queries/data.json b/tests/queries/data.json
--- a/tests/queries/data.json
+++ b/tests/queries/data.json
@@ -1 +1 @@
-a
+b
diff --git a/tests/gone.py b/tests/gone.py
deleted file mode 100644
--- a/tests/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-a
"""
ROW: dict[str, Any] = {
    "repo": "psf/requests",
    "instance_id": "psf__requests-1",
    "base_commit": "a" * 40,
    "patch": "--- a/x\n+++ b/x\n",
    "test_patch": TEST_PATCH,
    "problem_statement": "It is broken.\u2028Mend it.",
    "version": "2.0",
    "FAIL_TO_PASS": '["tests/queries/tests.py::test_a[x y]"]',
    "PASS_TO_PASS": ["tests/queries/tests.py::test_b"],
    "hints_text": "",
}
DJANGO = {**ROW, "repo": "django/django", "instance_id": "django__django-7", "version": "4.2"}


def write(tmp_path: Path, *rows: dict[str, Any] | str, name: str = "rows.jsonl") -> Path:
    file = tmp_path / name
    # Not ASCII only: a line separator inside a row must not cut it.
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows))
    return file


def one(tmp_path: Path, **changes: Any) -> AgentTask:
    row = {key: value for key, value in {**ROW, **changes}.items() if value is not None}
    [task] = load(str(write(tmp_path, row)), reading())
    return task


def reading(kind: EnvironmentKind = EnvironmentKind.DOCKER) -> Reading:
    return Reading(pack=lambda folder: pack(folder)[0], kind=kind)


def test_a_classic_row_becomes_a_task(tmp_path: Path) -> None:
    task = one(tmp_path)
    assert isinstance(task.goal, TestsGoal)
    assert (task.name, task.dataset, task.description) == ("psf__requests-1", "rows", ROW["problem_statement"])
    assert task.environment.image == "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-1:latest"
    assert (task.environment.workdir, task.environment.network) == ("/testbed", Network.NONE)
    assert task.goal.fail_to_pass == ("tests/queries/tests.py::test_a[x y]",)
    assert task.goal.pass_to_pass == ("tests/queries/tests.py::test_b",)
    assert task.goal.log_parser == "pytest"
    assert task.goal.test_command.endswith("\npytest -rA tests/queries/tests.py")
    assert "conda activate testbed" in task.goal.test_command
    assert task.solution == PatchSolution(patch=ROW["patch"])


def test_django_is_run_by_its_own_runner_with_modules(tmp_path: Path) -> None:
    [task] = load(str(write(tmp_path, DJANGO)), reading())
    assert isinstance(task.goal, TestsGoal)
    assert task.goal.log_parser == "django"
    assert task.goal.test_command.endswith("--settings=test_sqlite --parallel 1 queries.tests")
    [old] = load(str(write(tmp_path, {**DJANGO, "version": "1.9"})), reading())
    assert isinstance(old.goal, TestsGoal)
    assert old.goal.test_command.endswith("./tests/runtests.py --verbosity 2 queries.tests")


def test_sympy_is_run_by_its_own_runner(tmp_path: Path) -> None:
    goal = one(tmp_path, repo="sympy/sympy", FAIL_TO_PASS=["test_a"]).goal
    assert isinstance(goal, TestsGoal)
    assert goal.log_parser == "sympy"
    assert goal.test_command.endswith("bin/test -C --verbose tests/queries/tests.py")


@pytest.mark.parametrize("column", ["image_name", "docker_image", "image"])
def test_a_row_may_name_its_image(tmp_path: Path, column: str) -> None:
    environment = one(tmp_path, **{column: "example.org/own:1"}, workdir="/workspace").environment
    assert (environment.image, environment.workdir, environment.env) == ("example.org/own:1", "/workspace", {})


def test_an_official_image_has_its_python_on_the_path_of_every_command(tmp_path: Path) -> None:
    assert one(tmp_path).environment.env["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"test_cmd": "make test"}, "make test"),
        ({"test_cmds": ["a", "b"]}, "a\nb"),
        ({"install_config": {"test_cmd": "pytest -x"}}, "pytest -x tests/queries/tests.py"),
        ({"test_cmd": "make test", "eval_script": "other"}, "make test"),
    ],
)
def test_a_row_may_bring_its_test_command(tmp_path: Path, changes: dict[str, Any], command: str) -> None:
    goal = one(tmp_path, build_context=None, **changes).goal
    assert isinstance(goal, TestsGoal)
    assert goal.test_command.split("fi\n", 1)[1] == command


@pytest.mark.parametrize("source", ["image_name", "build_context"])
def test_a_row_says_of_its_environment_what_the_schema_has_no_words_for(tmp_path: Path, source: str) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text("FROM scratch\n")
    words = {"setup": ["make"], "reuse": "shared-readonly", "network": "model-only", "storage_mb": 256}
    found = one(tmp_path, **{source: "context", "megaflow": words}).environment
    assert (found.setup, found.reuse, found.network) == (("make",), Reuse.SHARED_READONLY, Network.MODEL_ONLY)
    assert found.resources.disk_bytes == 256 << 20
    plain = one(tmp_path, **{source: "context"}).environment
    assert (plain.setup, plain.reuse, plain.network) == ((), Reuse.RECYCLED, Network.NONE)
    assert plain.resources.disk_bytes is None


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"set_up": ["make"]}, r"row 1 \(psf__requests-1\): field megaflow.set_up: expected one of setup, reuse, netw"),
        (["make"], "field megaflow: expected a map with any of setup, reuse"),
        ({"network": "vpn"}, "field megaflow.network: expected input that should be 'none', 'model-only'"),
        ({"network": "allowlist"}, r"\(psf__requests-1\): expected `allowed_hosts` with the network `allowlist`"),
    ],
)
def test_a_row_whose_own_words_are_wrong_is_named_with_what_is_known(
    tmp_path: Path, words: object, complaint: str
) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        one(tmp_path, megaflow=words)


def test_an_evaluation_script_lays_out_the_tests_itself(tmp_path: Path) -> None:
    goal = one(tmp_path, eval_script="#!/bin/bash\ngit apply …\n", log_parser="parse_log_pytest_v2").goal
    assert isinstance(goal, TestsGoal)
    assert (goal.test_patch, goal.test_command, goal.log_parser) == ("", "#!/bin/bash\ngit apply …\n", "pytest")


def test_a_build_context_beside_the_file_is_stored_once(tmp_path: Path) -> None:
    context = tmp_path / "images" / "one"
    context.mkdir(parents=True)
    (context / "Dockerfile").write_text("FROM scratch\n")
    stored: list[Path] = []

    def note(folder: Path) -> Bundle:
        stored.append(folder)
        return pack(folder)[0]

    rows = [{**ROW, "instance_id": f"a__b-{number}", "build_context": "images/one"} for number in range(2)]
    write(tmp_path, *rows)
    tasks = load(str(tmp_path), Reading(pack=note, kind=EnvironmentKind.LOCAL))
    assert stored == [context.resolve()]
    assert [task.environment.kind for task in tasks] == [EnvironmentKind.LOCAL] * 2
    assert all(task.environment.build and task.environment.image is None for task in tasks)
    assert isinstance(tasks[0].goal, TestsGoal)
    assert tasks[0].goal.test_command == "pytest -rA tests/queries/tests.py"  # no conda in images of our own


def test_a_json_list_and_a_folder_are_read_like_a_file_of_lines(tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([ROW, DJANGO]))
    write(tmp_path, ROW, "", DJANGO, "")
    names = ["psf__requests-1", "django__django-7"]
    for argument in (listed, tmp_path / "rows.jsonl", tmp_path):
        assert [task.name for task in load(str(argument), reading())] == names


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"instance_id": ""}, "field instance_id: expected a text that is not empty; found ''"),
        ({"instance_id": "../x"}, r"\(\.\./x\): field instance_id: expected at most 200 letters"),
        ({"instance_id": "a/../x"}, "field instance_id: expected at most 200 letters"),
        ({"problem_statement": None}, "field problem_statement: expected a text that is not empty; found nothing"),
        ({"base_commit": 7}, "field base_commit: expected a text that is not empty; found 7"),
        ({"FAIL_TO_PASS": "test_a"}, "field FAIL_TO_PASS: expected a list of test names.*; found 'test_a'"),
        ({"PASS_TO_PASS": None}, "field PASS_TO_PASS: expected a list"),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": "[]"}, "at least one test"),
        ({"test_patch": ["x"]}, "field test_patch: expected a patch as text"),
        ({"test_cmd": [1]}, "field test_cmd: expected a command"),
        ({"log_parser": "parse_log_cargo"}, "field log_parser: expected one of .*django.*; found 'parse_log_cargo'"),
        ({"build_context": "nowhere"}, "field build_context: expected a folder below"),
        ({"build_context": "../.."}, "field build_context: expected a folder below"),
        (
            {"repo": "a/b", "FAIL_TO_PASS": ["T"], "PASS_TO_PASS": []},
            "field test_cmd: expected the test command of a/b",
        ),
        ({"workdir": 3}, "field workdir: expected a text"),
    ],
)
def test_a_bad_row_is_named_with_its_file_number_and_field(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    row = {key: value for key, value in {**ROW, **changes}.items() if value is not None}
    with pytest.raises(DatasetInvalid, match=complaint) as caught:
        load(str(write(tmp_path, DJANGO, row)), reading())
    assert f"{tmp_path / 'rows.jsonl'}, row 2" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{", "row 2: expected JSON; found"), ("[1]", "row 2: expected a JSON object"), ("[" * 100_000, "expected JSON")],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        load(str(write(tmp_path, ROW, line)), reading())


def test_a_file_that_is_not_text_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DatasetInvalid, match="UTF-8"):
        load(str(tmp_path / "a.jsonl"), reading())
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DatasetInvalid, match="at least one row"):
        load(str(tmp_path / "b.jsonl"), reading())


def test_every_parser_that_a_row_may_name_exists() -> None:
    assert set(swebench._KNOWN_PARSERS.values()) >= set(PARSERS)
