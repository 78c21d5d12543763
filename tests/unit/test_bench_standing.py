"""The page that says which goals hold: of what the results' files say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import control_record, standing
from bench.control_record import Part
from bench.record import RESULTS, row


def _kept(folder: Path, file: str, value: float) -> None:
    rows = [row("speed: ours", value, "1/s", goal=10.0), row("speed: another", 3.0, "1/s")]
    control_record.keep(folder / f"{file}.json", "speed", Part(rows, {}), busy=0.0, took_s=1.0)


@pytest.mark.parametrize(("value", "holds"), [(12.0, True), (8.0, False)])
def test_a_goal_is_listed_and_first_of_all_where_it_is_missed(tmp_path: Path, value: float, holds: bool) -> None:
    _kept(tmp_path, "images", value)
    text = standing.write(tmp_path).read_text()
    missed, rest = text.split("## Environments")
    assert ("speed: ours" in missed) is not holds
    assert ("No goal is." in missed) is holds
    assert f"| speed: ours | {value:g} 1/s | 10 1/s | {'yes' if holds else '**no**'} |" in rest
    assert f"{int(holds)} of 1 goals met" in rest
    assert "another" not in text


def test_what_was_not_measured_is_named_with_its_command(tmp_path: Path) -> None:
    assert "Not measured yet: `make bench-env`." in standing.page(tmp_path)


def test_the_page_that_is_kept_says_what_the_files_beside_it_say() -> None:
    assert (RESULTS / standing.PAGE).read_text() == standing.page(RESULTS), "run `python -m bench.standing`"
    assert all(isinstance(json.loads((RESULTS / f"{name}.json").read_text()), dict) for name in standing._FILES)
