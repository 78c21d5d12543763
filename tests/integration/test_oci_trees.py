"""What an environment wrote is added up and removed, also where no path leads, and while somebody moves it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.host import disk, trees
from app.host.disk import DiskUsage

KIBI = 1 << 10


def deep(folder: Path, levels: int) -> None:
    """Folders in each other, and a file of 64 KiB in the lowest."""
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a folder", dir_fd=here)
        below = os.open("a folder", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    file = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(file, bytes(64 * KIBI))
    os.fsync(file)
    os.close(file)
    os.close(here)


def test_what_no_path_leads_to_counts_and_goes(tmp_path: Path) -> None:
    deep(tmp_path / "top", 1200)
    found = DiskUsage.of(tmp_path / "top")
    assert (found.size_bytes >= 64 * KIBI, found.files) == (True, 1201)
    assert trees.remove(tmp_path / "top") == 1201
    assert list(tmp_path.iterdir()) == []
    assert (trees.remove(tmp_path / "top"), DiskUsage.of(tmp_path / "top")) == (0, DiskUsage())


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_bytes(bytes(100 * KIBI))
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to(tmp_path / "other")
    assert DiskUsage.of(tmp_path / "top").size_bytes < 50 * KIBI
    assert trees.remove(tmp_path / "top") == 1
    assert (tmp_path / "other" / "kept").exists()


def test_a_folder_that_moves_while_it_is_looked_at_hides_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "top"
    for name in ("a", "b", "c"):
        deep(top / name, 3) if top.exists() else (top.mkdir(), deep(top / name, 3))
    whole = DiskUsage.of(top).size_bytes
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "unseen").write_bytes(bytes(900 * KIBI))
    enter, moved = disk._Walk._enter, []

    def moving(self: disk._Walk, handle: int, name: str) -> None:
        enter(self, handle, name)
        if not moved and (lowest := next(top.glob("?/a folder/a folder/a folder/bottom"), None)) and name == "a folder":
            moved.append(lowest)
            way = os.readlink(f"/proc/self/fd/{handle}")
            os.rename(way, tmp_path / "elsewhere" / "taken")

    monkeypatch.setattr(disk._Walk, "_enter", moving)
    found = DiskUsage.of(top).size_bytes
    assert moved
    assert whole - 100 * KIBI <= found <= whole, "two of three are counted, and nothing from outside"
    assert found >= 2 * 64 * KIBI


def test_a_file_with_two_names_takes_its_bytes_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(64 * KIBI))
    once = DiskUsage.of(tmp_path)
    os.link(tmp_path / "one", tmp_path / "other")
    assert DiskUsage.of(tmp_path) == DiskUsage(once.size_bytes, 2)


def test_counting_ends_a_little_above_the_most_that_a_limit_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MOST_FILES", 10)
    for number in range(50):
        (tmp_path / str(number)).touch()
    assert DiskUsage.of(tmp_path).files == 11
