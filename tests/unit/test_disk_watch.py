"""Watching what environments write: each by itself, whatever becomes of the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import EnvironmentFailed, EnvironmentOverLimit, HostDiskFull
from app.host.disk import DiskUsage
from app.host.disk_watch import DiskWatch, files_within


class Writer:
    def __init__(self, name: str, written: Callable[[], DiskUsage | None]) -> None:
        self.id = name
        self.written = written
        self.ended: type[EnvironmentFailed] | None = None

    @property
    def gone(self) -> bool:
        return self.ended is not None

    def fail(self, why: str, *, kind: type[EnvironmentFailed]) -> None:
        self.ended = kind


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskWatch:
    monkeypatch.setattr("app.host.disk_watch._CHECK_S", 60.0)  # the test checks
    return DiskWatch(tmp_path, tmp_path / "turn", dict)


def test_the_largest_on_a_full_disk_is_not_ended_as_one_that_took_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.host.disk_watch._CHECK_S", 60.0)
    monkeypatch.setattr("app.host.disk_watch._RESERVE", 2.0)  # every disk is nearly full
    small, large = Writer("small", lambda: DiskUsage(10)), Writer("large", lambda: DiskUsage(20))
    watch = DiskWatch(tmp_path, tmp_path / "turn", lambda: {"small": DiskUsage(50 << 20), "large": DiskUsage(60 << 20)})
    watch.watch(small, 100)
    watch.watch(large, 100)
    watch.check()
    assert (small.ended, large.ended) == (None, HostDiskFull)


@pytest.mark.parametrize(
    ("most", "more"),
    [(DiskUsage(100), DiskUsage(101)), (DiskUsage(0, files_within(100)), DiskUsage(0, files_within(100) + 1))],
    ids=["bytes", "files"],
)
def test_who_writes_more_than_it_may_is_ended(watch: DiskWatch, most: DiskUsage, more: DiskUsage) -> None:
    within, over = Writer("within", lambda: most), Writer("over", lambda: more)
    watch.watch(within, 100)
    watch.watch(over, 100)
    watch.check()
    assert (within.ended, over.ended) == (None, EnvironmentOverLimit)


def test_a_larger_disk_limit_allows_more_files() -> None:
    assert files_within(1 << 20) == 250_000
    assert files_within(16 << 30) == 1 << 20
    assert files_within(1 << 50) == 1 << 22, "what is counted at all"


def test_where_inodes_run_out_the_one_with_most_files_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.host.disk_watch._CHECK_S", 60.0)
    disk = os.statvfs(tmp_path)
    fields = list(disk)
    fields[4], fields[5], fields[7] = disk.f_blocks, disk.f_files or 1, 0  # bytes are free, inodes are not
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    large, many = Writer("large", lambda: DiskUsage(90, 1)), Writer("many", lambda: DiskUsage(1, 90))
    sizes = {"large": DiskUsage(60 << 20, 1), "many": DiskUsage(1, 60_000)}
    watch = DiskWatch(tmp_path, tmp_path / "turn", lambda: sizes)
    watch.watch(large, 100)
    watch.watch(many, 100)
    watch.check()
    assert (large.ended, many.ended) == (None, HostDiskFull)
