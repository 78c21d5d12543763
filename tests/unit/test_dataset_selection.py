"""Choosing tasks: by name, language, repository, date, pass rate and a sample; several datasets as one pool."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.datasets.entries import TaskEntry
from app.datasets.selection import Pool, Selection, choose
from app.datasets.source import open_dataset
from app.errors import DatasetInvalid, SpecInvalid
from tests.unit.dataset_adapters import ADAPTERS, reading, row, write

ENTRIES = [
    TaskEntry(f"{owner}__{name}-{number}", f"{owner}/{name}", language, datetime(2020 + number, 1, 1, tzinfo=UTC))
    for owner, name, language in (("django", "django", "python"), ("tokio-rs", "tokio", "rust"), ("a", "b", "go"))
    for number in range(4)
]


def chosen(pass_rates: dict[str, float] | None = None, entries: list[TaskEntry] = ENTRIES, **asked: Any) -> list[str]:
    return [entry.name for entry in choose(entries, Selection(**asked), "d", pass_rates)]


def test_names_and_patterns_choose_and_exclude() -> None:
    assert chosen() == [entry.name for entry in ENTRIES]
    assert chosen(only=("django__*", "a__b-0")) == [*(f"django__django-{n}" for n in range(4)), "a__b-0"]
    assert chosen(only=("django__*",), exclude=("*-[12]",)) == ["django__django-0", "django__django-3"]


def test_language_and_repository_choose() -> None:
    assert chosen(languages=("Rust",)) == [f"tokio-rs__tokio-{n}" for n in range(4)]
    assert chosen(repositories=("*/b", "django/django"), languages=("go",)) == [f"a__b-{n}" for n in range(4)]


def test_a_task_of_the_first_day_is_in_and_one_of_the_end_is_out() -> None:
    found = chosen(only=("a__*",), since=datetime(2021, 1, 1), until=datetime(2023, 1, 1, tzinfo=UTC))
    assert found == ["a__b-1", "a__b-2"]


def test_a_pass_rate_leaves_out_what_the_run_has_not_scored() -> None:
    rates = {"a__b-0": 0.0, "a__b-1": 0.5, "a__b-2": 1.0}
    assert chosen(rates, pass_rate="0<p<1", pass_rate_from="r") == ["a__b-1"]
    assert chosen(rates, pass_rate="p<=0.5", pass_rate_from="r") == ["a__b-0", "a__b-1"]
    assert chosen(rates, pass_rate="0.5<=p", pass_rate_from="r") == ["a__b-1", "a__b-2"]


def test_a_sample_is_the_same_on_every_machine() -> None:
    """Written down, so that a release that would draw others fails here."""
    assert chosen(sample=3, sample_seed=0) == ["tokio-rs__tokio-3", "a__b-2", "a__b-3"]
    assert chosen(sample=3, sample_seed=0, limit=2) == ["tokio-rs__tokio-3", "a__b-2"], "the limit counts after it"


@given(st.integers(1, 12), st.integers(0, 2**32), st.randoms())
def test_a_sample_has_its_size_its_order_and_does_not_depend_on_the_others(size: int, seed: int, random: Any) -> None:
    found = chosen(sample=size, sample_seed=seed)
    assert len(found) == size
    assert found == [entry.name for entry in ENTRIES if entry.name in set(found)]
    shuffled = list(ENTRIES)
    random.shuffle(shuffled)
    assert set(chosen(entries=shuffled, sample=size, sample_seed=seed)) == set(found)
    kept = [entry for entry in ENTRIES if entry.name in set(found)]
    assert chosen(entries=kept, sample=size, sample_seed=seed) == found


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"only": ("nothing*",)}, "dataset 'd' has no task 'nothing\\*'; it has"),
        ({"exclude": ("nothing",)}, "has no task 'nothing'"),
        ({"languages": ("cobol",)}, "expected tasks in cobol; found go, python, rust"),
        ({"repositories": ("x/y",)}, "has no repository 'x/y'; it has"),
        ({"exclude": ("*",)}, r"all of {'exclude': \['\*'\]}; found none among 12; leave one of them out"),
        ({"pass_rate": "0<p<1", "pass_rate_from": "r"}, "expected scored tasks of it in run 'r'; found none"),
    ],
)
def test_a_condition_that_no_task_can_meet_is_refused(asked: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecInvalid, match=complaint):
        chosen(**asked)


def test_a_condition_on_what_the_dataset_does_not_say_is_refused() -> None:
    silent = [replace(entry, language=None, created_at=None) for entry in ENTRIES]
    with pytest.raises(SpecInvalid, match="does not say in which language"):
        chosen(entries=silent, languages=("go",))
    with pytest.raises(SpecInvalid, match=r"expected a date \(created_at\) of every task; found none of 12"):
        chosen(entries=silent, since=datetime(2020, 1, 1))


@pytest.mark.parametrize(
    "asked",
    [
        {"pass_rate": "0<p<1"},
        {"pass_rate_from": "r"},
        {"pass_rate": "p", "pass_rate_from": "r"},
        {"since": datetime(2024, 1, 1), "until": datetime(2023, 1, 1)},
        {"sample": 0},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_a_selection_that_contradicts_itself_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Selection(**asked)


# --- Pools ----------------------------------------------------------------------------------------------------------


def pool(*files: Path) -> Pool:
    return Pool([open_dataset(f"plain={file}", reading(), ADAPTERS) for file in files])


def test_several_datasets_are_one_pool_in_their_order(tmp_path: Path) -> None:
    found = pool(write(tmp_path / "one.jsonl", [row(1)]), write(tmp_path / "two.jsonl", [row(2)]))
    assert [entry.name for entry in found.entries()] == ["a__b-1", "a__b-2"]
    assert [(task.name, task.dataset) for task in found.tasks(found.entries())] == [
        ("a__b-1", "one"),
        ("a__b-2", "two"),
    ]
    assert found.name == "one+two"


def test_a_name_that_two_datasets_have_begins_with_the_dataset_in_both(tmp_path: Path) -> None:
    found = pool(write(tmp_path / "one.jsonl", [row(1), row(2)]), write(tmp_path / "two.jsonl", [row(2), row(3)]))
    names = [entry.name for entry in found.entries()]
    assert names == ["a__b-1", "one/a__b-2", "two/a__b-2", "a__b-3"]
    some = choose(found.entries(), Selection(only=("two/*",)), "d")
    assert [(task.name, task.dataset) for task in found.tasks(some)] == [("two/a__b-2", "two")]


def test_one_dataset_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "one.jsonl", [row(1)])
    with pytest.raises(DatasetInvalid, match="expected one task of each name; found 'one/a__b-1' twice"):
        pool(file, file).entries()
    odd = write(tmp_path / "o n e.jsonl", [row(1)])
    with pytest.raises(DatasetInvalid, match="give the dataset's file another name"):
        pool(file, odd).entries()


def test_a_dataset_with_a_selection_of_its_own_brings_these_tasks_to_the_pool(tmp_path: Path) -> None:
    dated = write(tmp_path / "dated.jsonl", [row(0, created_at="2024-01-01"), row(1, created_at="2025-06-01")])
    undated = write(tmp_path / "undated.jsonl", [row(2), row(1)])
    both = pool(dated, undated)
    until = Selection(until=datetime(2025, 3, 1))
    both.own = [until, None]
    assert [entry.name for entry in both.entries()] == ["a__b-0", "a__b-2", "undated/a__b-1"]
    assert [task.name for task in both.tasks(both.entries())] == ["a__b-0", "a__b-2", "undated/a__b-1"]
    both.own = [until, until]
    with pytest.raises(SpecInvalid, match=r"dataset 'undated': expected a date \(created_at\)"):
        both.entries()
