"""Which dataset an argument names, whose rules read it, and what is said of bad rows."""

from __future__ import annotations

import builtins
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from app.datasets import row_files
from app.datasets.catalogue import CATALOGUE
from app.datasets.entries import OpenedDataset
from app.datasets.source import FORMATS, arguments_of, open_dataset, parsed
from app.errors import DatasetInvalid, DependencyMissing, SpecInvalid, UnknownName
from tests.unit.dataset_adapters import ADAPTERS, parquet, reading, row, write

ADAPTER_NAMES = {
    "swe-bench", "swe-bench-multilingual", "swe-gym", "swe-rebench", "swe-rebench-v2", "swe-smith", "multi-swe-bench",
    "multi-swe-rl", "swe-bench-live", "swe-flow", "swe-bench-pro",
}  # fmt: skip


def opened(argument: object) -> OpenedDataset:
    return open_dataset(str(argument), reading(), ADAPTERS)


def names(argument: object) -> list[str]:
    return [task.name for task in opened(argument).tasks()]


# --- The catalogue --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", CATALOGUE.values(), ids=lambda one: one.name)
def test_each_known_dataset_has_rules_a_place_and_a_source(dataset: Any) -> None:
    if dataset.versions:
        assert dataset.adapter in {one.name for one in FORMATS}
        assert all(where.url.startswith("https://") and len(where.commit) == 40 for _, where in dataset.versions)
    else:
        assert dataset.adapter in ADAPTER_NAMES
        assert dataset.hub_id is None or dataset.hub_id.count("/") == 1
    assert dataset.source
    assert dataset.licence
    assert dataset.citation
    places = [(one.hub_id, one.patterns()) for one in CATALOGUE.values() if one.hub_id]
    assert len(set(places)) == len(places), "two are the same files"


# --- Arguments ------------------------------------------------------------------------------------------------------


def test_a_name_may_have_a_revision_and_goes_before_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swe-gym").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (parsed("swe-gym").name, parsed("swe-gym").path) == ("swe-gym", None)
    assert (parsed("swe-gym@v1").name, parsed("swe-gym@v1").revision) == ("swe-gym", "v1")
    assert parsed("./swe-gym").path == Path("./swe-gym")


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(DatasetInvalid, match=r"'swe-bench-verfied': expected NAME .*did you mean swe-bench-verified\?"):
        parsed("swe-bench-verfied")
    with pytest.raises(UnknownName, match=r"on none; give a local copy as swe-flow=PATH"):
        open_dataset("swe-flow", reading(), {"swe-flow": ADAPTERS["plain"]})


def test_a_local_copy_of_an_unknown_dataset_is_refused_with_the_names(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [row()])
    with pytest.raises(DatasetInvalid, match=r"expected NAME=PATH with one of .*swe-gym"):
        parsed(f"swe-gim={file}")
    with pytest.raises(DatasetInvalid, match="found nothing at"):
        parsed(f"swe-gym={tmp_path / 'nowhere'}")
    with pytest.raises(DatasetInvalid, match="local copy has no revision"):
        opened(f"plain@abc={file}")


def test_a_path_with_an_equals_sign_or_a_comma_is_a_path(tmp_path: Path) -> None:
    file = write(tmp_path / "a=b,c.jsonl", [row()])
    assert names(file) == ["a__b-1"]
    assert arguments_of(str(file)) == (str(file),)
    assert arguments_of("swe-gym, swe-rebench") == ("swe-gym", "swe-rebench")


# --- Whose rules ----------------------------------------------------------------------------------------------------


def test_rows_are_recognised_by_a_column_that_no_other_dataset_has(tmp_path: Path) -> None:
    assert opened(write(tmp_path / "a.jsonl", [row()])).origin().adapter == "plain"
    assert opened(write(tmp_path / "b.jsonl", [row(plain_column=None, other_column=1)])).origin().adapter == "other"
    twice = {"plain": ADAPTERS["plain"], "plain-lite": ADAPTERS["plain"]}  # which is no choice
    assert open_dataset(str(tmp_path / "a.jsonl"), reading(), twice).origin().adapter == "plain"


@pytest.mark.parametrize("changes", [{"plain_column": None}, {"other_column": 1}], ids=["none fits", "two fit"])
def test_rows_that_could_be_of_several_are_refused_with_the_choices(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = write(tmp_path / "rows.jsonl", [row(**changes)])
    with pytest.raises(DatasetInvalid, match=rf"other={file}; they may be of other, plain"):
        opened(file)
    assert names(f"other={file}") == ["a__b-1"]


def test_rows_of_no_known_dataset_are_refused_with_their_columns(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match="found the columns answer, question; `megaflow dataset list`"):
        opened(write(tmp_path / "rows.jsonl", [{"question": "?", "answer": "!"}]))


def test_a_task_by_another_name_than_it_is_chosen_by_is_refused(tmp_path: Path) -> None:
    class Renaming(type(ADAPTERS["plain"])):  # type: ignore[misc]
        def task(self, row: Any, reading: Any) -> Any:
            return super().task(row, reading).model_copy(update={"name": "other"})

    dataset = open_dataset(f"p={write(tmp_path / 'a.jsonl', [row()])}", reading(), {"p": Renaming()})
    with pytest.raises(DatasetInvalid, match="expected the task's name to be 'a__b-1'; found 'other'"):
        list(dataset.tasks())


def test_a_folder_or_a_files_name_may_say_the_language(tmp_path: Path) -> None:
    values = [{**row(number, instance_id=f"o__r-{number}"), "repo": "r"} for number in range(2)]
    write(tmp_path / "multi" / "go" / "o__r_dataset.jsonl", values[:1])
    write(tmp_path / "multi" / "rust" / "o__r_dataset.jsonl", values[1:])
    dataset = open_dataset(f"multi-swe-bench={tmp_path / 'multi'}", reading(), {"multi-swe-bench": ADAPTERS["plain"]})
    assert [entry.language for entry in dataset.entries()] == ["go", "rust"]
    parquet(tmp_path / "live" / "data" / "js-00000-of-00001.parquet", values[:1])
    dataset = open_dataset(
        f"swe-bench-live-multilang={tmp_path / 'live'}", reading(), {"swe-bench-live": ADAPTERS["plain"]}
    )
    assert [entry.language for entry in dataset.entries()] == ["js"]


# --- Files ----------------------------------------------------------------------------------------------------------


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return parquet(folder / "rows.parquet", rows)


def as_lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write(folder / "rows.jsonl", rows)


def as_list(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.json"
    file.write_text(json.dumps(rows))
    return file


def as_shards(folder: Path, rows: list[dict[str, Any]]) -> Path:
    parquet(folder / "data" / "train-00000-of-00002.parquet", rows[:1])
    parquet(folder / "data" / "train-00001-of-00002.parquet", rows[1:])
    return folder


def as_folder_of_lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    write(folder / "a.jsonl", rows[:1])
    write(folder / "b.jsonl", rows[1:])
    return folder


@pytest.mark.parametrize("make", [as_parquet, as_lines, as_list, as_shards, as_folder_of_lines])
def test_rows_are_the_same_whatever_holds_them(
    tmp_path: Path, make: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    rows = [
        row(1, repo="a/b", language="Go", created_at="2024-05-01T10:00:00Z"),
        row(2, repo="a/c", language="rust", created_at="2024-06-01 10:00:00"),
        row(3, repo="a/c", language="rust", created_at="2024-07-01"),
    ]
    dataset = opened(make(tmp_path, rows))
    first, second, _ = dataset.entries()
    assert (first.name, first.repository, first.language) == ("a__b-1", "a/b", "go")
    assert first.created_at == datetime(2024, 5, 1, 10, tzinfo=UTC)
    assert second.created_at == datetime(2024, 6, 1, 10, tzinfo=UTC)
    assert [task.name for task in dataset.tasks({"a__b-3", "a__b-1"})] == ["a__b-1", "a__b-3"]
    assert dataset.origin().tasks == 3
    assert set(dataset.columns()) == set(rows[0])


def test_rows_without_a_name_are_named_by_repository_and_number(tmp_path: Path) -> None:
    values = {**row(instance_id=None), "org": "o", "repo": "r", "number": 7}
    dataset = opened(f"numbered={write(tmp_path / 'rows.jsonl', [values])}")
    assert [(entry.name, entry.repository) for entry in dataset.entries()] == [("o__r-7", "o/r")]
    assert [task.name for task in dataset.tasks({"o__r-7"})] == ["o__r-7"]


def test_of_a_hubs_layout_a_local_copy_gives_the_split_alone(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "train-00000-of-00001.parquet", [row(1)])
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", [row(2)])
    dataset = open_dataset(f"swe-gym={tmp_path}", reading(), {"swe-gym": ADAPTERS["plain"]})
    assert [entry.name for entry in dataset.entries()] == ["a__b-1"]
    assert [task.dataset for task in dataset.tasks()] == ["swe-gym"]


def test_files_of_a_hubs_cache_may_be_links_to_its_blobs_and_no_others(tmp_path: Path) -> None:
    blob = parquet(tmp_path / "blobs" / "abc", [row()])
    snapshot = tmp_path / "snapshots" / ("0" * 40)
    (snapshot / "data").mkdir(parents=True)
    link = snapshot / "data" / "train-00000-of-00001.parquet"
    link.symlink_to(os.path.relpath(blob, link.parent))
    assert names(f"plain={snapshot}") == ["a__b-1"]
    secret = parquet(tmp_path / "elsewhere" / "secret.parquet", [row()])
    link.unlink()
    link.symlink_to(secret)
    with pytest.raises(SpecInvalid, match="link that leads out"):
        opened(f"plain={snapshot}")


def test_parquet_without_its_reader_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parquet(tmp_path / "rows.parquet", [row()])
    real = builtins.__import__

    def without_pyarrow(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DependencyMissing, match=r"pyarrow.*pip install 'megaflow\[datasets\]'"):
        opened(f"plain={file}").entries()


# --- Bad rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("{", "row 2: expected JSON; found"),
        ("no JSON", r"row 2: expected JSON; found 'no JSON' on line 2 \(Expecting value, character 1\)"),
        ("\ufeff{}", "row 2: field instance_id, statement: expected the columns"),  # after a byte-order mark
        ("[" * 100_000, "row 2: expected JSON; found lists or objects nested too deep"),
        ("[1]", r"row 2: expected a JSON object; found \[1\]"),
        ('{"instance_id": "a", "statement": NaN}', "row 2: expected JSON; found NaN"),
        ('{"instance_id": "\udcff", "statement": "x"}', "row 2: expected JSON in UTF-8"),
        (row(2, statement=None), "row 2 .a__b-2.: field statement: expected the columns of plain"),
        (
            row(2, statement=None, statment="fix"),
            "row 2 .a__b-2.: field statement: .*none of that name; 'statment' for 'statement'?",
        ),
        (
            {**row(2), "statement": None},
            "row 2 .a__b-2.: field statement: expected a text; found nothing",
        ),
        (row(2, statement=7), "row 2 .a__b-2.: field statement: expected a text; found 7"),
        (row(1), r"row 2 .a__b-1.: field instance_id: expected one task of each name; found 'a__b-1' twice"),
        (row(2, instance_id="../x"), "row 2 .*field instance_id: expected at most 200 letters"),
        (row(2, instance_id=[1]), r"row 2: field instance_id: expected a text that is not empty; found \[1\]"),
        (row(2, created_at="yesterday"), "row 2 .*field created_at: expected a date such as .*'yesterday'"),
    ],
    ids=str,
)
def test_one_bad_row_is_named_with_its_number_and_field(tmp_path: Path, bad: Any, complaint: str) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(row(1)), bad if isinstance(bad, str) else json.dumps(bad)]
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    with pytest.raises(DatasetInvalid, match=complaint):
        names(file)
    (fault,) = filter(None, opened(file).checked())
    assert fault.message
    assert fault.where.startswith(f"{file}, row 2")


def test_a_test_in_both_lists_is_a_fault_of_lint_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [row(1, kept=["u"]), row(2, kept=["t"])])
    assert names(file) == ["a__b-1", "a__b-2"]
    good, fault = opened(file).checked()
    assert good is None
    assert fault is not None
    assert "each test in one of the lists; found 't'; it is in PASS_TO_PASS, too" in fault.message


def test_of_many_bad_rows_the_first_ten_are_named_and_all_are_counted(tmp_path: Path) -> None:
    rows = [row(number, statement=None if number % 2 else "Do it.") for number in range(2, 42)]
    file = write(tmp_path / "rows.jsonl", [row(1), *rows])
    with pytest.raises(DatasetInvalid) as caught:
        names(file)
    said = str(caught.value)
    assert "found 20 that cannot be read; `megaflow dataset lint` names every fault" in said
    assert said.count("field statement") == 10
    assert said.endswith("and 10 more")
    found = list(opened(file).checked())
    faults = [one for one in found if one is not None]
    assert (len(faults), found.count(None)) == (20, 21)
    assert {fault.field for fault in faults} == {"statement"}
    write(file, [row(number, statement=number) for number in range(12)])
    with pytest.raises(DatasetInvalid, match="found 12 that cannot be read") as refused:
        names(file)
    assert str(refused.value).count("expected a text") == 10, "so it is where their rules refuse them"
    write(file, [row(1), row(2, statement=7)])
    assert [task.name for task in opened(file).tasks({"a__b-1"})] == ["a__b-1"], "the other was not chosen"


# --- Content and cost -----------------------------------------------------------------------------------------------


def test_the_content_hash_is_of_the_bytes_and_not_of_the_name(tmp_path: Path) -> None:
    one = opened(write(tmp_path / "one.jsonl", [row()])).origin()
    same = opened(write(tmp_path / "same.jsonl", [row()])).origin()
    other = opened(write(tmp_path / "other.jsonl", [row(statement="Do it!")])).origin()
    assert one.content_hash == same.content_hash != other.content_hash


def test_fifty_thousand_rows_take_little_time_and_no_more_memory_than_their_entries(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    filler = json.dumps("diff --git a/x b/x\n+def test(): ...\n" * 60)
    with file.open("w") as opened_file:
        for number in range(50_000):
            opened_file.write(f'{{"instance_id": "a__b-{number}", "statement": {filler}, "plain_column": 1}}\n')
    size = file.stat().st_size
    began = time.process_time()
    dataset = opened(file)
    assert len(dataset.entries()) == 50_000
    assert dataset.origin().tasks == 50_000
    assert time.process_time() - began < 5
    tracemalloc.start()
    count = sum(1 for _ in islice(row_files.rows(file), 5_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 5_000
    assert peak < 2 << 20 < size // 10
