"""Task folders that a registry lists: in git at a commit, or beside the registry. The repositories lie on this host."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from app.artifacts.bundles import pack
from app.datasets.base import Reading
from app.datasets.catalogue import CATALOGUE, GitFolder
from app.datasets.source import open_dataset
from app.errors import DatasetInvalid, DatasetUnavailable, UnknownName
from tests.unit.folder_shell import committed
from tests.unit.task_folders import files, harbor, terminal_bench

URL = "https://git.example.org/tasks"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository on this host that git finds under the https address."""
    folder = tmp_path / "repository"
    for name, value in {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{folder}.insteadOf",
        "GIT_CONFIG_VALUE_0": f"{URL}.git",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def reading(tmp_path: Path) -> Reading:
    return Reading(pack=lambda folder: pack(folder)[0], cache=tmp_path / "cache")


def registry(tmp_path: Path, *entries: dict[str, Any]) -> Path:
    file = tmp_path / "registry.json"
    file.write_text(json.dumps(entries))
    return file


def of_harbor(commit: str, *paths: str, version: str = "2.0") -> dict[str, Any]:
    tasks = [{"name": path, "git_url": f"{URL}.git", "git_commit_id": commit, "path": path} for path in paths]
    return {"name": "tb", "version": version, "description": "", "tasks": tasks}


def test_harbors_registry_gives_its_tasks_at_their_commit(tmp_path: Path, repository: Path) -> None:
    for name in ("one", "two", "three"):
        harbor(repository / name)
    commit = committed(repository, {})
    harbor(repository / "later")
    committed(repository, {})
    file = registry(tmp_path, of_harbor(commit, "three", "one"))
    dataset = open_dataset(str(file), reading(tmp_path))
    assert [(task.name, task.dataset) for task in dataset.tasks()] == [("three", "tb"), ("one", "tb")]
    assert (dataset.origin().adapter, dataset.origin().revision) == ("harbor", "2.0")
    assert not any(dataset.checked())


def test_a_repository_is_fetched_once(tmp_path: Path, repository: Path) -> None:
    harbor(repository / "one")
    file = registry(tmp_path, of_harbor(committed(repository, {}), "one"))
    before = open_dataset(str(file), reading(tmp_path)).origin()
    repository.rename(tmp_path / "away")
    assert open_dataset(str(file), reading(tmp_path)).origin() == before


def test_terminal_benchs_registry_gives_the_subset_of_a_version(tmp_path: Path, repository: Path) -> None:
    for name in ("one", "two"):
        terminal_bench(repository / "tasks" / name)
    entry = {"name": "core", "version": "0.1", "github_url": URL, "dataset_path": "./tasks", "branch": "main",
             "commit_hash": committed(repository, {}), "task_id_subset": ["two"]}  # fmt: skip
    file = registry(tmp_path, entry, {**entry, "version": "0.2", "task_id_subset": None})
    assert [task.name for task in open_dataset(f"core@0.1={file}", reading(tmp_path)).tasks()] == ["two"]
    assert [task.name for task in open_dataset(f"core@0.2={file}", reading(tmp_path)).tasks()] == ["one", "two"]
    with pytest.raises(UnknownName, match=r"name one: core@0\.1=.*; known: core@0\.1, core@0\.2"):
        open_dataset(str(file), reading(tmp_path))
    with pytest.raises(UnknownName, match="found 'other'"):
        open_dataset(f"other={file}", reading(tmp_path))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"git_url": "http://git.example.org/x"}, "entry 1: field url: expected an https:// address"),
        ({"git_url": "ext::sh -c true"}, "expected an https:// address"),
        ({"git_commit_id": "head"}, "field commit: expected 40 hex digits"),
        ({"git_commit_id": "--upload-pack=x"}, "field commit: expected 40 hex digits"),
        ({"path": 7}, "field path: expected a text"),
    ],
    ids=str,
)
def test_a_registry_that_cannot_be_trusted_is_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    entry = of_harbor("0" * 40, "one")
    entry["tasks"][0] |= change
    with pytest.raises(DatasetInvalid, match=complaint):
        open_dataset(str(registry(tmp_path, entry)), reading(tmp_path))


def test_a_path_out_of_the_repository_is_refused(tmp_path: Path, repository: Path) -> None:
    harbor(repository / "one")
    harbor(tmp_path / "secret")
    file = registry(tmp_path, of_harbor(committed(repository, {}), "../../secret"))
    with pytest.raises(Exception, match="a link that leads out of it"):
        open_dataset(str(file), reading(tmp_path))


def test_a_repository_that_does_not_answer_is_said_so_and_leaves_nothing(tmp_path: Path, repository: Path) -> None:
    file = registry(tmp_path, of_harbor("0" * 40, "one"))
    with pytest.raises(DatasetUnavailable, match=r"expected git fetch to fetch the tasks; found: .*give a local copy"):
        open_dataset(str(file), reading(tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_stands_for_one_in_git_lfs_is_refused(tmp_path: Path, repository: Path) -> None:
    harbor(repository / "one")
    harbor(repository / "two")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    files(repository, {"two/environment/data.bin": pointer})
    commit = committed(repository, {})
    first = registry(tmp_path, of_harbor(commit, "one"))
    assert [task.name for task in open_dataset(str(first), reading(tmp_path)).tasks()] == ["one"]
    both = registry(tmp_path, of_harbor(commit, "one", "two"))
    with pytest.raises(DatasetInvalid, match=r"two/environment/data\.bin: expected the file itself; .*Git LFS"):
        open_dataset(str(both), reading(tmp_path))


def test_the_known_terminal_bench_comes_from_git_at_its_commit(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal_bench(repository / "tasks" / "one")
    where = GitFolder(f"{URL}.git", committed(repository, {}), "tasks")
    known = dataclasses.replace(CATALOGUE["terminal-bench"], versions=(("0.1.1", where),))
    monkeypatch.setitem(CATALOGUE, "terminal-bench", known)
    dataset = open_dataset("terminal-bench@0.1.1", reading(tmp_path))
    assert [(task.name, task.dataset) for task in dataset.tasks()] == [("one", "terminal-bench")]
    assert dataset.origin().revision == where.commit


def test_a_local_copy_of_terminal_bench_2_is_read_by_its_format(tmp_path: Path) -> None:
    harbor(tmp_path / "copy" / "one")
    (task,) = open_dataset(f"terminal-bench-2={tmp_path / 'copy'}", reading(tmp_path)).tasks()
    assert task.dataset == "terminal-bench-2"
    terminal_bench(tmp_path / "other" / "one")
    with pytest.raises(DatasetInvalid, match="expected task folders in the format harbor; found none"):
        open_dataset(f"terminal-bench-2={tmp_path / 'other'}", reading(tmp_path)).entries()


def test_an_unknown_version_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown version of dataset terminal-bench-2 '9'; known: 2\.0"):
        open_dataset("terminal-bench-2@9", reading(tmp_path))
    assert CATALOGUE["terminal-bench-2"].version(None)[0] == "2.0"


def test_the_content_hash_of_folders_is_of_names_modes_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "one"

    def digest() -> str:
        return open_dataset(str(folder), reading(tmp_path)).origin().content_hash

    harbor(folder)
    first = digest()
    (folder / ".git").mkdir()
    assert digest() == first
    (folder / "tests" / "test.sh").chmod(0o755)
    second = digest()
    (folder / "instruction.md").write_text("Do more.")
    assert len({first, second, digest()}) == 3
