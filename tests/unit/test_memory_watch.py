"""Kills for want of memory: each told once, by a file that is open for as long as somebody watches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.host.memory_watch import MemoryWatch


@pytest.fixture(
    params=["oom_kill_disable 0\nunder_oom 0\noom_kill {}\n", "low 0\noom 3\noom_kill {}\noom_group_kill 9\n"]
)
def counter(request: pytest.FixtureRequest, tmp_path: Path) -> Counter:
    """As either version of control groups has it."""
    return Counter(tmp_path / "counter", request.param)


class Counter:
    def __init__(self, file: Path, text: str) -> None:
        self.file = file
        self._text = text
        self.set(0)

    def set(self, kills: int) -> None:
        self.file.write_text(self._text.format(kills))

    @property
    def open_here(self) -> int:
        """How many times this process has it open."""
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [os.path.realpath(link) for link in links].count(str(self.file))


def _none() -> None:
    return None


def test_a_kill_is_told_once(counter: Counter) -> None:
    watch = MemoryWatch(counter.file, _none)
    told = []
    for kills in (0, 1, 1, 3, 3):
        counter.set(kills)
        told.append(watch.killed(suspected=False))
    assert told == [False, True, False, True, False]
    watch.close()


def test_the_file_is_open_once_and_closed_with_the_watch(counter: Counter) -> None:
    watch = MemoryWatch(counter.file, _none)
    assert counter.open_here == 0, "not before it is needed"
    for _ in range(3):
        watch.killed(suspected=False)
    assert counter.open_here == 1
    watch.close()
    assert counter.open_here == 0
    counter.set(5)
    assert not watch.killed(suspected=True), "whoever closed it is not told any more"
    assert counter.open_here == 0
    watch.close()


def test_one_that_was_forgotten_leaves_nothing_open(counter: Counter) -> None:
    MemoryWatch(counter.file, _none).killed(suspected=False)
    assert counter.open_here == 0


def test_a_file_that_comes_later_is_found(counter: Counter) -> None:
    counter.file.unlink()
    watch = MemoryWatch(counter.file, _none)
    assert not watch.killed(suspected=True)
    counter.set(1)
    assert watch.killed(suspected=False)
    watch.close()


def test_without_a_file_the_environment_is_asked_when_there_is_reason() -> None:
    asked = []

    def inside() -> int:
        asked.append(1)
        return 1

    watch = MemoryWatch(None, inside)
    assert not watch.killed(suspected=False)
    assert not asked
    assert watch.killed(suspected=True)
    assert not watch.killed(suspected=True)
    watch.close()


def test_the_count_is_of_all_kills_whether_told_or_not(counter: Counter) -> None:
    watch = MemoryWatch(counter.file, _none)
    assert watch.count() == 0
    counter.set(3)
    assert watch.count() == 3
    assert watch.killed(suspected=False), "to count is not to tell"
    assert watch.count() == 3
    watch.close()
    assert watch.count() is None
    assert MemoryWatch(None, lambda: 7).count() == 7


@pytest.mark.parametrize("nested", [False, True], ids=["limited-itself", "limited-above"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_of_a_group_that_never_was_at_its_limit_is_the_hosts_doing(
    tmp_path: Path, version: int, nested: bool
) -> None:
    own = tmp_path / "nested" if nested else tmp_path
    own.mkdir(exist_ok=True)
    file = own / ("memory.oom_control" if version == 1 else "memory.events")

    def show(full: bool) -> None:
        most = (256 << 20) - (1 << 20 if full else 64 << 20)
        for folder, limited in ((own, False), (tmp_path, True)):
            if version == 1:
                (folder / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
                (folder / "memory.limit_in_bytes").write_text(f"{256 << 20 if limited else 9223372036854771712}\n")
                (folder / "memory.max_usage_in_bytes").write_text(f"{most}\n")
            else:
                (folder / "memory.events").write_text(f"low 0\noom {int(full and limited)}\noom_kill 2\n")
                (folder / "memory.max").write_text(f"{256 << 20}\n" if limited else "max\n")

    show(full=False)
    watch = MemoryWatch(file, _none)
    assert (watch.killed(suspected=True), watch.count()) == (False, 0)
    show(full=True)
    assert (watch.killed(suspected=True), watch.count()) == (True, 2)
    watch.close()


@pytest.mark.parametrize(("above", "counts"), [("megaflow-project-x", True), ("kubepods", False)])
@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_ours_around_a_group_is_its_tasks_and_one_of_others_is_the_hosts(
    tmp_path: Path, version: int, above: str, counts: bool
) -> None:
    around, own = tmp_path / above, tmp_path / above / "container"
    own.mkdir(parents=True)
    for folder, full in ((own, False), (around, True)):
        if version == 1:
            (folder / "memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
            (folder / "memory.limit_in_bytes").write_text(f"{256 << 20}\n")
            (folder / "memory.max_usage_in_bytes").write_text(f"{(255 if full else 128) << 20}\n")
        else:
            (folder / "memory.events").write_text(f"low 0\noom {int(full)}\noom_kill 1\n")
            (folder / "memory.max").write_text(f"{256 << 20}\n")
    watch = MemoryWatch(own / ("memory.oom_control" if version == 1 else "memory.events"), _none)
    assert watch.killed(suspected=True) == counts
    watch.close()
