"""What a run knows of its datasets, and choosing by the pass rates of an earlier run, against a real PostgreSQL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import SpecInvalid, UnknownName
from app.ledger import results, schedules
from app.ledger.database import Database
from tests.integration.command import CommandLine
from tests.integration.rows import a_run, a_task


def rows(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    row = {
        "repo": "a/b", "base_commit": "c" * 40, "problem_statement": "p", "patch": "", "test_patch": "",
        "FAIL_TO_PASS": ["t.py::t"], "PASS_TO_PASS": [], "test_cmd": "pytest -rA", "log_parser": "pytest",
        "image": "example.org/image:1", "created_at": "2024-05-01",
    }  # fmt: skip
    file.write_text("".join(json.dumps({**row, "instance_id": f"a__b-{n}"}) + "\n" for n in range(4)))
    return file


def scored(database: Database, run: Any, name: str, *rewards: float, **values: Any) -> None:
    for replica, reward in enumerate(rewards):
        verdict = {"reward": reward, "counts": True}
        a_task(database, run, name=name, replica=replica, verdict=verdict, state="succeeded", **values)


def test_a_run_says_which_bytes_its_tasks_are_from_and_how_they_were_chosen(
    megaflow: CommandLine, tmp_path: Path
) -> None:
    file = rows(tmp_path)
    megaflow("submit", f"own={file}", "--agent", "nop", "--sample", 2, "--sample-seed", 7, "--name", "sampled")
    (run,) = megaflow.json("status", "sampled")["runs"]
    assert run["provenance"]["selection"] == {"sample": 2, "sample_seed": 7}
    assert (run["provenance"]["tasks"], run["provenance"]["chosen"]) == (4, 2)
    (dataset,) = run["provenance"]["datasets"]
    assert (dataset["name"], dataset["tasks"], dataset["adapter"]) == ("mine", 4, "own")
    assert len(dataset["content_hash"]) == 64


def test_the_same_seed_submits_the_same_tasks(megaflow: CommandLine, tmp_path: Path) -> None:
    asked = ("submit", f"own={rows(tmp_path)}", "--agent", "nop", "--sample", 2, "--dry-run")
    assert megaflow.json(*asked)["tasks"] == megaflow.json(*asked)["tasks"]
    found = {tuple(megaflow.json(*asked, "--sample-seed", seed)["tasks"]) for seed in range(8)}
    assert len(found) > 1


def test_several_datasets_are_submitted_as_one_pool(megaflow: CommandLine, tmp_path: Path) -> None:
    file = rows(tmp_path)
    told = megaflow.json("submit", f"own={file}", "demo", "--agent", "nop", "--dry-run", "--task", "*-1")["tasks"]
    assert "a__b-1" in told
    assert "pytoolz__toolz-1" in told


def test_tasks_are_chosen_by_the_pass_rates_of_a_run(megaflow: CommandLine, database: Database, tmp_path: Path) -> None:
    run = a_run(database, name="first")
    scored(database, run, "a__b-0", 0.0, 0.0)
    scored(database, run, "a__b-1", 1.0, 0.0)
    scored(database, run, "a__b-2", 1.0, 1.0)
    scored(database, run, "a__b-3", 1.0, 0.0, scripted=True)
    assert results.pass_rates(database, run) == {"a__b-0": 0.0, "a__b-1": 0.5, "a__b-2": 1.0}
    asked = ("submit", f"own={rows(tmp_path)}", "--agent", "nop", "--dry-run")
    assert megaflow.json(*asked, "--pass-rate", "0<p<1", "--from", "first")["tasks"] == ["a__b-1"]
    assert megaflow.json(*asked, "--pass-rate", "p<=0.5", "--from", "first")["tasks"] == ["a__b-0", "a__b-1"]
    with pytest.raises(UnknownName):
        megaflow(*asked, "--pass-rate", "0<p<1", "--from", "nothing")
    empty = a_run(database, name="empty")
    with pytest.raises(SpecInvalid, match="expected scored tasks of it in run 'empty'"):
        megaflow(*asked, "--pass-rate", "0<p<1", "--from", "empty")
    assert results.run_head(database, empty).provenance is None


def test_a_schedule_keeps_what_chooses_its_tasks(megaflow: CommandLine, database: Database, tmp_path: Path) -> None:
    chosen = ("--repo", "a/*", "--since", "2024-01-01", "--limit", 3)
    megaflow("schedule", "add", "nightly", "0 3 * * *", f"own={rows(tmp_path)}", "--agent", "nop", *chosen)
    megaflow("schedule", "add", "all", "0 3 * * *", "demo", "--agent", "nop")
    kept = {row.name: row.submission for row in schedules.all_of(database)}
    assert kept["nightly"]["selection"]["repositories"] == ["a/*"]
    assert kept["nightly"]["selection"]["since"] == "2024-01-01T00:00:00Z"
    assert "selection" not in kept["all"]


def test_a_pass_rate_is_of_one_agent_and_of_no_baseline(database: Database) -> None:
    run = a_run(database, name="several")
    scored(database, run, "a__b-2", 1.0, agent="mini-swe-agent")
    scored(database, run, "a__b-2", 0.0, agent="nop")
    assert results.pass_rates(database, run, {"nop"}) == {"a__b-2": 1.0}
    with pytest.raises(SpecInvalid, match="one agent and model"):
        results.pass_rates(database, run)
