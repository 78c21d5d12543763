"""Bad input and bad weather: one clear message, no traceback, nothing half done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.datasets.source import DEMO
from tests.acceptance.conftest import System
from tests.services import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


def _row(**changes: Any) -> dict[str, Any]:
    row = {
        "instance_id": "owner__repo-1",
        "repo": "owner/repo",
        "base_commit": "a" * 40,
        "problem_statement": "It is broken.",
        "patch": "",
        "test_patch": "",
        "FAIL_TO_PASS": ["tests/test_a.py::test_a"],
        "PASS_TO_PASS": [],
        "version": "1",
        "image_name": "localhost:1/nobody/nothing:latest",
        "test_cmd": "python3 -m pytest -rA tests/test_a.py",
    }
    return {**row, **changes}


def _jsonl(path: Path, *rows: dict[str, Any] | str) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_a_batch_with_one_bad_row_names_the_row_and_submits_nothing(system: System, tmp_path: Path) -> None:
    before = system.rows("SELECT count(*) FROM runs")
    bad = _row(instance_id="owner__repo-2")
    del bad["base_commit"]
    for second, words in ((bad, ("2", "owner__repo-2", "base_commit")), ("{not json", ("2", "expected"))):
        done = system.megaflow("submit", _jsonl(tmp_path / "rows.jsonl", _row(), second), "--agent", "nop")
        flat = " ".join((done.stderr + done.stdout).split())
        assert (done.returncode != 0, "Traceback" in flat) == (True, False), flat
        assert [word for word in words if word not in flat] == [], flat
    assert system.rows("SELECT count(*) FROM runs") == before


def _one_result(system: System, dataset: str, *more: str) -> dict[str, Any]:
    done = system.megaflow("submit", dataset, "--mode", "persistent", "--wait", "--json", *more)
    found = json.loads(done.stdout)["results"]
    assert (done.returncode, len(found)) == (int(found[0]["verdict"] is None), 1), done.stderr
    return dict(found[0])


def test_an_image_that_cannot_be_pulled_ends_as_not_measured(system: System, tmp_path: Path) -> None:
    result = _one_result(system, _jsonl(tmp_path / "rows.jsonl", _row()), "--agent", "nop")
    assert (result["state"], result["end_reason"]) == ("failed", "environment_error")
    assert result["verdict"] is None
    assert len(result["attempts"]) == 3
    assert "localhost:1/nobody/nothing" in result["failure"]["message"]


def test_an_image_that_cannot_be_built_is_not_tried_again(system: System, task_folder: Callable[..., Path]) -> None:
    folder = task_folder(
        "unbuildable", dockerfile="ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nRUN echo why-it-failed; false\n"
    )
    result = _one_result(system, str(folder), "--agent", "nop")
    assert (result["state"], result["end_reason"], len(result["attempts"])) == ("failed", "environment_error", 1)
    assert "why-it-failed" in result["failure"]["message"]


def test_a_gold_patch_that_does_not_apply_is_a_broken_row_and_not_a_score(system: System, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (DEMO / "swebench" / "rows.jsonl").read_text().splitlines()]
    row = rows[0] | {
        "patch": "diff --git a/no.py b/no.py\n--- a/no.py\n+++ b/no.py\n@@ -1 +1 @@\n-nothing\n+something\n"
    }
    shutil.copytree(DEMO / "swebench" / row["build_context"], tmp_path / row["build_context"])
    result = _one_result(system, _jsonl(tmp_path / "rows.jsonl", row), "--agent", "oracle")
    assert (result["state"], result["end_reason"]) == ("failed", "invalid_spec")
    assert result["verdict"] is None


@pytest.mark.extra
def test_a_grading_command_that_never_ends_is_stopped_and_not_measured(
    system: System, task_folder: Callable[..., Path]
) -> None:
    folder = task_folder("endless-test", test="sleep 1000", verifier_s=2)
    result = _one_result(system, str(folder), "--agent", "nop")
    assert (result["state"], result["end_reason"], result["verdict"]) == ("failed", "grading_error", None)


@pytest.mark.agents
@pytest.mark.extra
@pytest.mark.parametrize("fault", ["down", "rubbish"])
def test_a_bad_model_endpoint_is_infrastructure_and_never_a_score(
    system: System, task_folder: Callable[..., Path], fault: str
) -> None:
    folder = task_folder("no-model")
    port = system.settings.flower_port if fault == "rubbish" else free_port()
    url = f"http://127.0.0.1:{port}/v1"
    submitted = system.json(
        *("submit", str(folder), "--agent", "mini-swe-agent", "--model", "m", "--base-url", url, "--no-check"),
        *("--mode", "persistent"),
    )
    run = system.flow.run(UUID(submitted["run_id"]))
    first = "SELECT state, end_reason FROM attempts a WHERE task_id = :t AND number = 1 AND state = 'error'"
    (ended,) = eventually(lambda: system.rows(first, t=run.handles[0].task_id), within_s=120)
    assert ended.end_reason == "model_error"
    run.cancel()
    assert run.handles[0].result(timeout=30).reward is None
