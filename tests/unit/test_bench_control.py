"""The arithmetic behind the control plane's figures."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bench import control_record
from bench.control_figures import contested_until, jain, median_ratio, most_at_once, quantile, vacancies_s
from bench.control_record import Part
from bench.record import row

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


def test_a_quantile_is_a_value_that_was_observed() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert quantile(values, 0.5) == 50.0
    assert quantile(values, 0.99) == 99.0
    assert quantile(values, 1.0) == 100.0
    assert quantile([7.0], 0.01) == 7.0
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_jains_index_is_one_for_equal_shares_and_one_nth_when_one_has_everything() -> None:
    assert jain([3.0] * 10) == pytest.approx(1.0)
    assert jain([5.0] + [0.0] * 9) == pytest.approx(0.1)
    assert jain([1.0, 2.0, 3.0]) == pytest.approx(36 / 42)
    assert jain([0.0, 0.0]) == 1.0


def test_a_ratio_is_taken_within_its_round() -> None:
    # The second round ran on a machine three times slower; the ratio does not notice.
    assert median_ratio([100.0, 33.0, 90.0], [50.0, 16.5, 45.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])


def test_every_completion_is_followed_by_the_claim_that_takes_its_slot() -> None:
    claimed = [at(0), at(0.1), at(10.5), at(11.75), at(21)]
    finished = [at(11), at(10), at(20.5), at(22), at(30)]
    assert vacancies_s(finished, claimed, slots=2) == pytest.approx([0.5, 0.75, 0.5])


def test_spans_that_touch_are_not_open_at_once() -> None:
    assert most_at_once([(at(0), at(10)), (at(10), at(20)), (at(5), at(15))]) == 2
    assert most_at_once([]) == 0


def test_users_contend_until_the_first_of_them_has_started_everything() -> None:
    starts = {"big": [at(1), at(2), at(3)], "small": [at(4), at(1)], "tiny": [at(6)]}
    assert contested_until(starts, {"big": 50, "small": 2, "tiny": 1}) == at(4)
    assert contested_until(starts, {"big": 50, "small": 3, "tiny": 2}) is None


def test_a_part_that_runs_again_replaces_itself_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    control_record.keep(path, "enqueue", Part([row("a", 1.0, "x")], {"took": (0.123456, 2)}), busy=0.0, took_s=1.0)
    control_record.keep(path, "hold", Part([row("b", 2.0, "x")], {}), busy=0.0, took_s=1.0)
    control_record.keep(path, "enqueue", Part([row("a", 3.0, "x")], {"took": (0.5, 2)}), busy=0.0, took_s=1.0)
    kept = control_record.load(path)
    assert list(kept) == ["enqueue", "hold"]
    assert [kept[name]["rows"][0]["value"] for name in kept] == [3.0, 2.0]
    assert kept["enqueue"]["samples"] == {"took": [0.5, 2]}
    assert json.loads(path.read_text()) == kept
