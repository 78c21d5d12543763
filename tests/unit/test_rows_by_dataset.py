"""Which dataset a row is of is told by its columns, or said by who has it; never guessed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.datasets.base import Reading, Row, RowAdapter
from app.datasets.faults import FaultPlace
from app.datasets.rows import ADAPTERS
from app.errors import DatasetInvalid
from tests.unit.row_reading import CLASSIC, goal_of, read, without
from tests.unit.test_rows_languages import MULTI, PRO, PYTHON, RUST
from tests.unit.test_rows_own import ROW as OWN
from tests.unit.test_rows_python import FLOW, MOTO, SMITH, V1, V2
from tests.unit.test_rows_swebench import REDIS, SCRIPTED

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "classic": ("swe-bench", CLASSIC), "multilingual": ("swe-bench-multilingual", REDIS),
    "5.x": ("swe-bench", SCRIPTED),
    "rebench": ("swe-rebench", V1), "rebench v2": ("swe-rebench-v2", V2), "smith": ("swe-smith", SMITH),
    "multi": ("multi-swe-bench", MULTI), "rl": ("multi-swe-rl", MULTI), "live": ("swe-bench-live", PYTHON),
    "multilang": ("swe-bench-live", RUST), "flow": ("swe-flow", FLOW), "pro": ("swe-bench-pro", PRO),
    "own": ("own", OWN),
}  # fmt: skip
ALL = {column for _, row in PUBLISHED.values() for column in row}


def row(values: dict[str, Any]) -> Row:
    return Row(values, FaultPlace("rows.jsonl, row 1"), "rows")


def rules_of(values: dict[str, Any]) -> list[RowAdapter]:
    return [one for one in {*ADAPTERS.values()} if one.recognises(values)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_row_is_recognised_by_its_own_rules_alone(name: str) -> None:
    """Also in a table that has the columns of several datasets, without a value in most."""
    dataset, values = PUBLISHED[name]
    assert rules_of(values) == rules_of(dict.fromkeys(ALL) | values) == [ADAPTERS[dataset]]


@pytest.mark.parametrize("values", [MOTO, {"instance_id": "a"}, {}, without(CLASSIC, "version")])
def test_no_rules_are_guessed(values: dict[str, Any]) -> None:
    assert rules_of(values) == []


@pytest.mark.parametrize("commit", ["main", "a" * 39, "A" * 40, "--upload-pack=x", "a" * 40 + "\n"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_base_commit_that_is_none_is_refused(name: str, commit: str, tmp_path: Path) -> None:
    dataset, values = PUBLISHED[name]
    if dataset == "swe-smith":
        pytest.skip("its tasks are branches of their names")
    changed = {"base": {**values["base"], "sha": commit}} if "base" in values else {"base_commit": commit}
    field = "base.sha" if "base" in values else "base_commit"
    with pytest.raises(DatasetInvalid, match=f"field {field}: expected a commit of 40 hex digits"):
        read(dataset, {**values, **changed}, tmp_path)


def test_rows_of_ones_own_may_say_head() -> None:
    assert goal_of(read("own", {**OWN, "base_commit": "HEAD"})).base_commit == "HEAD"


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in ("smith", "pro")])
def test_an_empty_gold_patch_is_named_by_lint_alone(name: str) -> None:
    dataset, values = PUBLISHED[name]
    column = "fix_patch" if "fix_patch" in values else "patch"
    assert read(dataset, {**values, column: " "}).solution is None
    with pytest.raises(DatasetInvalid, match=f"field {column}: expected the gold patch, or no such column; found ' '"):
        read(dataset, {**values, column: " "}, strict=True)
    if column == "patch":
        assert read(dataset, without(values, column), strict=True).solution is None


@pytest.mark.parametrize(("dataset", "adapter"), ADAPTERS.items())
def test_a_row_of_another_dataset_is_refused_by_what_it_lacks(dataset: str, adapter: Any) -> None:
    with pytest.raises(DatasetInvalid, match=f"expected the columns of {adapter.name}: .*the row has instance_id"):
        adapter.task(row({"instance_id": "a__a-1"}), Reading(pack=lambda folder: pytest.fail(f"packed {folder}")))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in ("own", "flow", "pro")])
def test_without_a_grading_library_nothing_is_made_up(name: str) -> None:
    dataset, values = PUBLISHED[name]
    if name == "multilang":
        pytest.skip("its row brings its own program")
    with pytest.raises(DatasetInvalid, match="found none here"):
        ADAPTERS[dataset].task(row(values), Reading(pack=lambda folder: pytest.fail(f"packed {folder}")))


ODD = (7, True, 1.5, ["x"], {"x": "y"}, "", "\0", "\ud800", float("nan"), [None], {"a": float("inf")})


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_an_odd_value_is_refused_by_name_or_can_be_stored(name: str, value: object) -> None:
    dataset, values = PUBLISHED[name]
    reading = Reading(
        pack=lambda folder: pytest.fail(f"packed {folder}"),
        describe=lambda judge, asked: {"test_command": "x", "image": "x:1"},
    )
    for column in values:
        with suppress(DatasetInvalid):
            stored = ADAPTERS[dataset].task(row({**values, column: value}), reading).model_dump_json()
            assert "\\u0000" not in stored
