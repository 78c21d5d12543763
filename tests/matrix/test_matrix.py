"""The fixtures are read by their datasets' rules, and the page says what the records say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.agents.installation import Installer
from app.artifacts.bundles import pack
from app.datasets.base import Reading
from app.datasets.source import open_dataset
from app.grading.resident_libraries import GradingLibraries
from app.models.spec import PatchSolution, TestsGoal
from tests.integration.inside_fixture import kept_tools
from tests.matrix import page
from tests.matrix.fixture import KINDS, Fixture, Kind
from tests.matrix.fixtures import all_fixtures
from tests.matrix.repository import RIGHT_ANSWER, SENTENCE, Patches, prepared
from tests.matrix.run import FRAMEWORKS, OURS, Record

FIXTURES = all_fixtures()


@pytest.fixture(scope="module")
def reading() -> Iterator[Reading]:
    """With the datasets' libraries, as installed."""
    libraries = GradingLibraries(Installer(kept_tools()).install_library)
    yield Reading(pack=lambda folder: pack(folder)[0], describe=libraries.describe)
    libraries.close()


@pytest.mark.timeout(600)  # the first run on a machine installs the libraries
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.title)
def test_each_task_is_read_by_the_rules_of_its_dataset(fixture: Fixture, reading: Reading, tmp_path: Path) -> None:
    dataset = open_dataset(fixture.write(tmp_path), reading)
    tasks = {task.name: task for task in dataset.tasks()}
    assert set(tasks) == set(fixture.names.values())
    built = {name.removesuffix(":latest") for image in fixture.images for name in image.names}
    for task in tasks.values():
        assert SENTENCE in task.description
        assert task.solution is not None
        if task.environment.image is not None:
            image = task.environment.image.removesuffix(":latest")
            assert {image, image.removeprefix("docker.io/")} & built
        else:
            assert task.environment.build is not None
        if isinstance(task.goal, TestsGoal):
            assert len((*task.goal.fail_to_pass, *task.goal.pass_to_pass)) == 3


def test_the_answers_of_the_wrong_tasks_are_others(reading: Reading, tmp_path: Path) -> None:
    fixture = next(one for one in FIXTURES if one.dataset == "swe-gym")
    dataset = open_dataset(fixture.write(tmp_path), reading)
    patches = {task.name: task.solution for task in dataset.tasks()}
    right, wrong, peculiar = (patches[fixture.names[kind]] for kind in KINDS)
    assert isinstance(right, PatchSolution)
    assert right == peculiar != wrong
    assert "+    return sum(items)\n" in right.patch


def test_the_same_content_has_the_same_commits() -> None:
    assert prepared(Patches.of) == prepared(Patches.of)
    assert prepared(lambda one: one.commit("x", RIGHT_ANSWER)) != prepared(lambda one: one.base)


def record(agent: str, kind: Kind, **changes: Any) -> Record:
    values = {
        "dataset": FIXTURES[0].title, "task": FIXTURES[0].names[kind], "kind": kind, "agent": agent,
        "mode": "ephemeral", "date": "2026-11-25", "expected": FIXTURES[0].expected(agent, kind), "state": "succeeded",
        "end_reason": "submitted", "reward": FIXTURES[0].expected(agent, kind), "grader": "swebench 4.1.0",
        "stand_in": agent == "swe-agent", "artifacts": {"patch": "ab" * 32},
    }  # fmt: skip
    return Record.model_validate(values | changes)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "real"),
        ({"stand_in": True}, "stand-in"),
        ({"reward": 0.0, "detail": "1 of 3"}, "not run (submitted, reward 0 instead of 1: 1 of 3)"),
        ({"end_reason": "step_limit"}, "not run (step_limit, reward 1 instead of 1)"),
        ({"reward": None, "state": "failed", "detail": "ImageUnavailable: x|y"}, "not run (ImageUnavailable: x/y)"),
        ({"reward": None, "state": "cancelled", "end_reason": None}, "not run (cancelled)"),
    ],
)
def test_a_cell_is_real_only_where_both_tasks_ended_right(changes: dict[str, Any], state: str) -> None:
    right = record("claude-code", Kind.RIGHT)
    assert page.state_of([right, record("claude-code", Kind.PECULIAR, **changes)]) == state
    assert page.state_of([]).startswith("not run")


def test_the_page_has_every_cell_and_its_evidence(tmp_path: Path) -> None:
    records = [record(agent, kind) for agent in FRAMEWORKS for kind in (Kind.RIGHT, Kind.PECULIAR)]
    records += [record(agent, kind) for agent in OURS for kind in KINDS]
    page.write(records, FIXTURES, tmp_path, commit="abc", minutes=1.0)
    written = (tmp_path / "compatibility.md").read_text()
    rows = [line for line in written.splitlines() if line.startswith("| SWE-bench | [")]
    assert [row.count("✓ **real**") for row in rows] == [4]
    assert f"4 of {5 * len(FIXTURES)} cells are `real`, 1 `stand-in`, {5 * len(FIXTURES) - 5} neither" in written
    assert "| SWE-bench | swebench 4.1.0 | 1, 0, 1 | 0, 0, 0 |" in written
    assert "| patch `abababababab` | 2026-11-25 |" in written
    for line in written.splitlines():
        if line.startswith("| ["):
            assert line.count("](#") == 5
    kept = json.loads((tmp_path / "compatibility.json").read_text())
    assert [Record.model_validate(one) for one in kept["records"]] == records


@pytest.mark.extra
@pytest.mark.docker
@pytest.mark.agents
@pytest.mark.timeout(3600)
def test_all_of_it(tmp_path: Path) -> None:
    """`make matrix`, with its page elsewhere."""
    command = [sys.executable, "-m", "tests.matrix", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
