"""What a producer asks for has bounds: of numbers that a database can hold, of names that people can read."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from app.cli import cli
from app.datasets.source import parsed
from app.errors import DatasetUnknown, SpecInvalid
from app.evaluation import Submission
from app.ledger.accept import NewRun, _check


@pytest.mark.parametrize(
    "words",
    ["--priority 99999999999", "--delay 1e300", "--deadline 1e300", "--deadline inf", "--timeout -5", "--delay nan"],
)
def test_a_number_out_of_its_range_is_a_usage_error(words: str) -> None:
    done = CliRunner().invoke(cli, ["submit", "demo", "-a", "nop", "--dry-run", *words.split()])
    assert done.exit_code in (2, 64), done.output
    assert words.split()[0] in done.output


@pytest.mark.parametrize(
    "run",
    [
        NewRun([], name="a\tb"),
        NewRun([], name="latest"),
        NewRun([], name="--dry-run"),
        NewRun([], name="x" * 201),
        NewRun([], user_name=" "),
        NewRun([], user_name="a\nb"),
        NewRun([], priority=99_999_999_999),
    ],
)
def test_the_api_refuses_names_and_numbers_that_nothing_can_hold(run: NewRun) -> None:
    with pytest.raises(SpecInvalid):
        _check(run)


def test_an_option_without_its_value_takes_no_other_option_for_it() -> None:
    with pytest.raises(ValidationError, match="does not begin with '-'"):
        CliRunner().invoke(cli, ["submit", "demo", "-a", "nop", "--name", "--dry-run"], catch_exceptions=False)


def test_an_empty_dataset_is_not_the_folder_of_the_caller() -> None:
    with pytest.raises(DatasetUnknown, match="found an empty text"):
        parsed(" ")


def test_a_schedule_keeps_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks").mkdir()
    for given, kept in (("tasks/", f"{tmp_path}/tasks"), ("own=./tasks,demo", f"own={tmp_path}/tasks,demo")):
        assert Submission(dataset=given, agent="nop").scheduled()["dataset"] == kept
