"""What a hostile dataset may try: reading the host's files, hanging the reader, values that break later steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import structlog
from pydantic import ValidationError

from app.artifacts.bundles import pack
from app.datasets.base import Reading
from app.errors import DatasetInvalid, SpecInvalid
from app.models.spec import EnvironmentSpec, Limits, Resources, ScriptGoal, TestsGoal
from app.task_files import read_inside
from tests.unit.dataset_adapters import load, reading
from tests.unit.task_folders import harbor, terminal_bench

SECRET = "the host's own secret"
BUNDLE = {"sha256": "0" * 64, "size_bytes": 1}


def rows(folder: Path, **more: object) -> Path:
    row = {
        "instance_id": "a__a-1", "repo": "a/a", "base_commit": "c" * 40, "problem_statement": "p", "patch": "",
        "test_patch": "", "FAIL_TO_PASS": ["t.py::t"], "PASS_TO_PASS": [], "build_context": "image",
        "test_cmd": "pytest",
    }  # fmt: skip
    (folder / "image").mkdir(parents=True)
    (folder / "image" / "Dockerfile").write_text("FROM x\n")
    (folder / "rows.jsonl").write_text(json.dumps(row | more) + "\n")
    return folder


HARBOR = ("task.toml", "instruction.md", "environment", "environment/Dockerfile", "tests", "tests/test.sh", "solution",
          "solution/solve.sh", "environment/docker-compose.yaml")  # fmt: skip
TERMINAL_BENCH = ("task.yaml", "Dockerfile", "docker-compose.yaml", "run-tests.sh", "solution.sh", "tests",
                  "tests/test_it.py")  # fmt: skip
ROWS = ("rows.jsonl", "image", "image/Dockerfile")
CASES = [(harbor, name) for name in HARBOR] + [(terminal_bench, name) for name in TERMINAL_BENCH]
CASES += [(rows, name) for name in ROWS]


@pytest.mark.parametrize(("make", "name"), CASES, ids=[f"{make.__name__}-{name}" for make, name in CASES])
def test_no_file_of_a_task_is_read_through_a_link_that_leads_out(tmp_path: Path, make: object, name: str) -> None:
    folder = make(tmp_path / "dataset")  # type: ignore[operator]
    target = folder / name
    away = tmp_path / "host" / target.name
    away.parent.mkdir()
    if target.exists():
        target.rename(away)
    else:
        away.write_text("services: {main: {build: .}}\n")
    target.symlink_to(away)
    for file in (one for one in ([away] if away.is_file() else away.rglob("*")) if one.is_file()):
        file.write_text(file.read_text() + f"\n# {SECRET}\n")
    packed: list[bytes] = []

    def keep(one: Path) -> object:
        bundle, archive = pack(one)
        packed.append(archive)
        return bundle

    with pytest.raises(SpecInvalid) as refused:
        load(str(folder), Reading(pack=keep))  # type: ignore[arg-type]
    assert SECRET not in str(refused.value)
    if make is harbor and name.split("/")[0] in ("tests", "solution"):
        assert "link" in str(refused.value)
    assert not [one for one in packed if SECRET.encode() in one]


@pytest.mark.parametrize("make", [harbor, terminal_bench])
def test_a_task_that_is_a_link_out_of_the_dataset_is_refused(tmp_path: Path, make: object) -> None:
    make(tmp_path / "host" / "other")  # type: ignore[operator]
    make(tmp_path / "dataset" / "own")  # type: ignore[operator]
    (tmp_path / "dataset" / "linked").symlink_to(tmp_path / "host" / "other")
    with pytest.raises(SpecInvalid, match=r"linked: expected it inside .* found a link that leads out"):
        load(str(tmp_path / "dataset"), reading())


def test_a_folder_of_two_formats_is_refused_and_what_is_no_task_is_named(tmp_path: Path) -> None:
    harbor(tmp_path / "tasks" / "one")
    (tmp_path / "tasks" / "notes").mkdir()
    with structlog.testing.capture_logs() as logs:
        assert len(load(str(tmp_path / "tasks"), reading())) == 1
    assert [(log["event"], log["folders"]) for log in logs] == [("dataset.folders_passed_over", "notes")]
    terminal_bench(tmp_path / "tasks" / "two")
    with pytest.raises(DatasetInvalid, match=r"one format; found .*task\.(toml|yaml) in (one|two)"):
        load(str(tmp_path / "tasks"), reading())


@pytest.mark.parametrize(
    ("column", "value"),
    [("patch", "a\0b"), ("base_commit", "--upload-pack=x"), ("workdir", "testbed"), ("test_patch", "\0")],
)
def test_odd_values_of_a_row_are_refused(tmp_path: Path, column: str, value: str) -> None:
    with pytest.raises(DatasetInvalid, match=r"row 1 \(a__a-1\)"):
        load(str(rows(tmp_path / "dataset", **{column: value})), reading())


def test_a_link_within_the_folder_is_read(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a")
    (folder / "instruction.md").rename(folder / "words.md")
    (folder / "instruction.md").symlink_to("words.md")
    assert load(str(folder), reading())[0].description == "Do it."


def test_a_pipe_and_a_file_without_end_are_refused_at_once(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a")
    (folder / "instruction.md").unlink()
    os.mkfifo(folder / "instruction.md")
    with pytest.raises(SpecInvalid, match="regular file"):
        load(str(folder), reading())
    (tmp_path / "large").write_bytes(b"x" * 1000)
    with pytest.raises(SpecInvalid, match="at most 999 bytes"):
        read_inside(tmp_path, tmp_path / "large", most=999)


def test_an_alias_bomb_in_a_task_yaml_is_refused(tmp_path: Path) -> None:
    folder = terminal_bench(tmp_path / "a")
    levels = "\n".join(f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}" for n in range(1, 12))
    merges = "\n".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}], k{n}: 1}}" for n in range(1, 9))
    (folder / "task.yaml").write_text(f"instruction: x\na0: &a0 {{k: v}}\n{levels}\nm0: &m0 {{k: v}}\n{merges}\n")
    with pytest.raises(DatasetInvalid, match="at most 20000 entries"):
        load(str(folder), reading())


@pytest.mark.parametrize(
    "toml",
    [
        "a = " + "[" * 20_000,
        "a = " + "9" * 10_000,
        '[environment]\nmemory = "' + "9" * 400 + 'G"',
        "[environment]\nmemory_mb = 99999999999999999999999",
        "[agent]\ntimeout_sec = 1e300",
        "[agent]\ntimeout_sec = inf",
        "[environment]\ncpus = true",
        '[environment]\nworkdir = "app"',
        '[environment]\ndocker_image = "Not An Image"',
        '[environment]\ndocker_image = "-v/:/host"',
        '[environment.env]\nA = "a\\u0000b"',
        '[environment]\nworkdir = "/a\\u0000b"',
    ],
    ids=lambda text: text[:40],
)
def test_odd_values_are_refused_where_the_dataset_is_read(tmp_path: Path, toml: str) -> None:
    folder = harbor(tmp_path / "a", toml)
    with pytest.raises(DatasetInvalid, match=r"task\.toml"):
        load(str(folder), reading())


@pytest.mark.parametrize(
    "make",
    [
        lambda: EnvironmentSpec(image="a b"),
        lambda: EnvironmentSpec(image="a/UPPER"),
        lambda: EnvironmentSpec(image="x", setup=("echo a\0b",)),
        lambda: EnvironmentSpec(image="x", env={"A": "\ud800"}),
        lambda: Resources(memory_bytes=2**70),
        lambda: Resources(pids=2**40),
        lambda: Limits(agent_timeout_s=1e12),
        lambda: Limits(max_steps=2**40),
        lambda: ScriptGoal.model_validate({"tests": BUNDLE, "command": "a\0b"}),
        lambda: TestsGoal(base_commit="c", test_patch="", test_command="a\0", fail_to_pass=("t",), pass_to_pass=()),
    ],
)
def test_the_python_api_refuses_them_too(make: object) -> None:
    with pytest.raises(ValidationError):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "image",
    ["x", "words:1", "docker.io/swebench/sweb.eval.x86_64.a_1776_b-1:latest", "127.0.0.1:5000/a/b__c:t", "[::1]:5000/a",
     "ghcr.io/a/b@sha256:" + "0" * 64, "sha256:" + "0" * 64, "localhost/a_b.c-d:v1.2"],
)  # fmt: skip
def test_real_image_names_are_taken(image: str) -> None:
    assert EnvironmentSpec(image=image).image == image


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('[verifier]\nenvironment_mode = "apart"', r"verifier.environment_mode"),
        ("[verifier]\nrun_twice = true", r"verifier\.run_twice: expected one of .*timeout_sec"),
        ("[agent]\nretries = 3", r"agent\.retries"),
        ("[environment]\nprivileged = true", r"environment\.privileged"),
    ],
)
def test_keys_that_nobody_knows_are_refused_by_name(tmp_path: Path, toml: str, said: str) -> None:
    folder = harbor(tmp_path / "a", toml)
    with pytest.raises(DatasetInvalid, match=said):
        load(str(folder), reading())
