"""The demo dataset's shape: complete, consistent, and silent about its answers. Reads files only."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.datasets.source import open_dataset
from tests.unit.dataset_adapters import reading

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


def added(patch: str) -> list[str]:
    return [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]


def touched(patch: str) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE))


def test_lint_finds_nothing() -> None:
    assert not any(open_dataset("demo", replace(reading(), strict=True)).checked())


def test_a_task_of_several_containers_is_judged_where_the_agent_is_not() -> None:
    for folder in SEVERAL.values():
        service = tomllib.loads((folder / "task.toml").read_text())["verifier"]["service"]
        assert service != "main"
        assert service in yaml.safe_load((folder / "environment" / "docker-compose.yaml").read_text())["services"]


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
def test_a_folder_s_scripts_find_their_places_by_variables(folder: Path) -> None:
    judge = (folder / "tests" / "test.sh").read_text()
    assert "${LOGS_DIR:-/logs}" in judge
    assert "${TESTS_DIR:-/tests}" in judge
    for script in (judge, *((folder / part).read_text() for part in ("environment/setup.sh", "solution/solve.sh"))):
        assert "${WORKDIR:-/app}" in script
        assert "/app/" not in script


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
