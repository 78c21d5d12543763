"""`megaflow dataset filter`: tasks by a run's pass rates as a dataset of their own, over a real ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import cli
from app.errors import DatasetInvalid, ExportRefused, SpecInvalid
from app.evaluation import Submission, prepare
from app.ledger.database import Database
from app.settings import Settings
from tests.integration.test_reports import Reports, verdict
from tests.unit.dataset_adapters import write
from tests.unit.row_reading import without
from tests.unit.test_dataset_commands import ROW


@pytest.fixture
def reports(settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> Reports:
    return Reports(settings, database, monkeypatch)


def filtered(*arguments: object) -> Any:
    found = CliRunner().invoke(cli, ["dataset", "filter", *map(str, arguments), "--json"])
    if found.exception is not None:
        raise found.exception
    return json.loads(found.stdout)


def rows(folder: Path) -> Path:
    """Three rows, one of them with a folder that its image is built from."""
    (folder / "context").mkdir(parents=True)
    (folder / "context" / "Dockerfile").write_text("FROM example.org/base:1\n")
    built = without(ROW, "image", instance_id="hard", build_context=str(folder / "context"))
    named = [{**ROW, "instance_id": name} for name in ("easy", "never")]
    return write(folder / "mine.jsonl", [built, *named])


def test_tasks_within_bounds_become_a_dataset_that_submit_takes(reports: Reports, tmp_path: Path) -> None:
    source = rows(tmp_path / "source")
    reports.run("night", {"easy": verdict(1.0), "hard": verdict(0.0)})
    reports.run("rated", {"easy": verdict(1.0), "hard": verdict(0.0)})
    to = tmp_path / "filtered"
    found = filtered(f"own={source}", "--pass-rate", "p<1", "--from", "night", "-o", to)
    assert (found["chosen"], found["tasks"], found["rated"], found["argument"]) == (1, 3, 2, f"own={to}")
    told = json.loads((to / "megaflow-provenance.json").read_text())
    assert (told["run"], told["pass_rate"], told["source"]["name"]) == ("night", "p<1", "mine")
    assert len(told["source"]["content_hash"]) == 64
    (row,) = map(json.loads, (to / "rows.jsonl").read_text().splitlines())
    assert (row["instance_id"], row["build_context"]) == ("hard", "context")
    (tmp_path / "source").rename(tmp_path / "elsewhere")  # the copy stands alone
    prepared = prepare(Submission(dataset=found["argument"], agent="nop"), reports.settings)
    assert [spec.task.name for spec in prepared.specs] == ["hard"]
    (dataset,) = prepared.provenance["datasets"]
    assert dataset["derived_from"] == told
    with pytest.raises(ExportRefused, match="does not exist yet"):
        filtered(found["argument"], "--pass-rate", "p<1", "--from", "night", "-o", to)


def test_a_mixed_dataset_is_filtered_by_parts(reports: Reports, tmp_path: Path) -> None:
    names = ("csv-to-jsonl", "more-itertools__more-itertools-1")
    reports.run("night", {names[0]: verdict(0.0), names[1]: verdict(0.0), "lost-settings": verdict(1.0)})
    found = filtered("demo", "--pass-rate", "p<=0.5", "--from", "night", "-o", tmp_path / "hard")
    prepared = prepare(Submission(dataset=found["argument"], agent="nop"), reports.settings)
    assert {spec.task.name for spec in prepared.specs} == set(names)
    original = prepare(Submission(dataset="demo", agent="nop"), reports.settings)
    kept = {spec.task.name: spec.task for spec in original.specs}
    for spec in prepared.specs:
        assert spec.task.model_copy(update={"dataset": "demo"}) == kept[spec.task.name]


def test_bounds_and_provenance_that_are_none_are_refused_by_name(reports: Reports, tmp_path: Path) -> None:
    source = rows(tmp_path / "source")
    reports.run("night", {"easy": verdict(1.0)})
    with pytest.raises(SpecInvalid, match=r"expected bounds of a pass rate.*'q<1'"):
        filtered(f"own={source}", "--pass-rate", "q<1", "--from", "night", "-o", tmp_path / "to")
    with pytest.raises(SpecInvalid, match="found none among 3"):
        filtered(f"own={source}", "--pass-rate", "0<p<1", "--from", "night", "-o", tmp_path / "to")
    assert not (tmp_path / "to").exists()
    (source.parent / "megaflow-provenance.json").write_text('{"run": 1}')
    source.rename(source.parent / "rows.jsonl")
    with pytest.raises(DatasetInvalid, match="expected what `megaflow dataset filter` wrote"):
        prepare(Submission(dataset=f"own={source.parent}", agent="nop"), reports.settings)
