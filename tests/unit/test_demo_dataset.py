"""The demo dataset's shape: complete, consistent, and silent about its answers. Reads files only."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "app" / "datasets" / "demo"
SWEBENCH = DEMO / "swebench"
ROWS = {row["instance_id"]: row for row in map(json.loads, (SWEBENCH / "rows.jsonl").read_text().splitlines())}
TASKS = {folder.name: folder for folder in sorted((DEMO / "tasks").iterdir()) if folder.is_dir()}
SEVERAL = {folder.name: folder for folder in sorted((DEMO / "several").iterdir()) if folder.is_dir()}
REPLAYS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((DEMO / "replay").glob("*.yaml"))}
ASKED = {name: row["problem_statement"] for name, row in ROWS.items()} | {
    name: (folder / "instruction.md").read_text() for name, folder in (TASKS | SEVERAL).items()
}
# What the public dataset's rows have, and what says how to build and judge ours.
PUBLIC = {
    "instance_id", "repo", "base_commit", "problem_statement", "hints_text", "patch", "test_patch", "FAIL_TO_PASS",
    "PASS_TO_PASS", "version", "created_at", "environment_setup_commit",
}  # fmt: skip
OURS = {"build_context", "test_cmd", "log_parser"}


def added(patch: str) -> list[str]:
    return [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]


def touched(patch: str) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE))


def test_there_are_enough_tasks_of_both_formats() -> None:
    assert len(ROWS) >= 5
    assert len({row["repo"] for row in ROWS.values()}) >= 4
    assert len(TASKS) >= 4


def test_a_task_of_several_containers_is_judged_where_the_agent_is_not() -> None:
    for folder in SEVERAL.values():
        service = tomllib.loads((folder / "task.toml").read_text())["verifier"]["service"]
        assert service != "main"
        assert service in yaml.safe_load((folder / "environment" / "docker-compose.yaml").read_text())["services"]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_has_the_public_columns_and_ours(row: dict[str, Any]) -> None:
    assert set(row) == PUBLIC | OURS
    assert re.fullmatch(r"[0-9a-f]{40}", row["base_commit"])
    assert row["FAIL_TO_PASS"]
    assert len(row["PASS_TO_PASS"]) >= 30
    assert not set(row["FAIL_TO_PASS"]) & set(row["PASS_TO_PASS"])


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_gold_patch_touches_the_library_and_the_hidden_tests_touch_tests(row: dict[str, Any]) -> None:
    assert touched(row["patch"])
    assert not [name for name in touched(row["patch"]) if "test" in name]
    assert {test.partition("::")[0] for test in row["FAIL_TO_PASS"]} == touched(row["test_patch"])
    assert all(name in row["test_cmd"] for name in touched(row["test_patch"]))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_problem_statement_does_not_contain_the_fix(row: dict[str, Any]) -> None:
    telling = [line for line in added(row["patch"]) if len(line) > 12]
    assert [line for line in telling if line in row["problem_statement"] + row["hints_text"]] == []


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_context_is_pinned_and_patches_what_the_row_repairs(row: dict[str, Any]) -> None:
    context = SWEBENCH / row["build_context"]
    (line,) = (context / "sources.txt").read_text().splitlines()
    assert re.fullmatch(r"[a-z-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line)
    assert touched((context / "bug.patch").read_text()) == touched(row["patch"])
    assert touched((context / "hide-tests.patch").read_text()) == touched(row["test_patch"])


@pytest.mark.parametrize("file", ["setup.sh", "Dockerfile"])
def test_all_contexts_of_rows_are_set_up_by_the_same_script(file: str) -> None:
    assert len({(SWEBENCH / row["build_context"] / file).read_text() for row in ROWS.values()}) == 1


def dockerfiles() -> list[Path]:
    return [*sorted(DEMO.rglob("Dockerfile")), ROOT / "worker_images" / "base" / "Dockerfile"]


@pytest.mark.parametrize("file", dockerfiles(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_dockerfile_needs_no_buildkit(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"^RUN\s+--|COPY\s+--(link|chmod|parents)|<<|^#\s*syntax=", text, re.MULTILINE)
    if DEMO in file.parents:
        assert "ARG BASE_IMAGE=megaflow/base:bookworm" in text
        # The last stage gets the finished folder only, never the context with the answer in it.
        last = text[text.rindex("\nFROM ") :]
        done = re.findall(r"^(?:COPY|ADD|RUN) .*", last, re.MULTILINE)
        assert [one for one in done if not one.startswith("RUN rm -rf /usr/lib/python3/dist-packages/")] in (
            ["COPY --from=planted /testbed /testbed"],
            ["COPY --from=prepared /app /app"],
        )


@pytest.mark.parametrize("folder", TASKS.values(), ids=TASKS)
def test_a_folder_has_the_format_s_parts(folder: Path) -> None:
    told = tomllib.loads((folder / "task.toml").read_text())
    assert (told.get("version") or told["schema_version"]) == "1.0"
    assert told["agent"]["timeout_sec"] > 0
    assert told["verifier"]["timeout_sec"] > 0
    assert {"cpus", "memory_mb", "allow_internet", "workdir"} <= set(told["environment"])
    for part in (
        "instruction.md",
        "environment/Dockerfile",
        "environment/setup.sh",
        "tests/test.sh",
        "solution/solve.sh",
    ):
        assert (folder / part).stat().st_size > 0
    assert list(folder.glob("tests/test_*.py"))


@pytest.mark.parametrize("folder", TASKS.values(), ids=TASKS)
def test_a_folder_s_scripts_find_their_places_by_variables(folder: Path) -> None:
    judge = (folder / "tests" / "test.sh").read_text()
    assert "${LOGS_DIR:-/logs}" in judge
    assert "${TESTS_DIR:-/tests}" in judge
    for script in (judge, *((folder / part).read_text() for part in ("environment/setup.sh", "solution/solve.sh"))):
        assert "${WORKDIR:-/app}" in script
        assert "/app/" not in script


def test_one_folder_rewards_in_shares() -> None:
    assert [name for name, folder in TASKS.items() if "reward.json" in (folder / "tests" / "test.sh").read_text()]


def test_every_task_has_a_script_and_every_script_a_task() -> None:
    assert set(REPLAYS) == set(ROWS) | set(TASKS) | set(SEVERAL)


@pytest.mark.parametrize("name", REPLAYS)
def test_a_script_is_known_by_a_sentence_of_its_task_alone(name: str) -> None:
    assert [task for task, text in ASKED.items() if REPLAYS[name]["match"] in text] == [name]


@pytest.mark.parametrize("name", REPLAYS)
def test_a_script_looks_acts_and_then_submits(name: str) -> None:
    turns = REPLAYS[name]["turns"]
    assert set(REPLAYS[name]) == {"match", "turns"}
    assert 3 <= len(turns) <= 6
    assert [set(turn) for turn in turns[:-1]] == [{"thought", "command"}] * (len(turns) - 1)
    assert turns[-1] == {"thought": turns[-1]["thought"], "submit": True}
    # A working folder may be anywhere, and several tasks may share one machine's temporary folder.
    assert not re.search(r"/testbed|/app\b|/tmp\b", "\n".join(turn.get("command", "") for turn in turns))
