"""Limits written for, and counts read from, either version of the kernel's control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.host import cgroups
from app.host.cgroup_counts import GroupUsage, MemoryWatch, PidsWatch, usage
from app.host.cgroups import Cgroup
from app.models.spec import Resources

LIMITS = Resources(cpus=0.5, memory_bytes=64 << 20, pids=77)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What would be written to the kernel's files, by name below /sys/fs/cgroup; of one file, one after the other."""
    written: dict[str, str] = {}

    def note(file: Path | str, value: str) -> None:
        name = str(Path(file).relative_to(tmp_path))
        written[name] = f"{written[name]} {value}" if name in written else value

    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "_write", note)
    return written


@pytest.fixture
def version_1(tmp_path: Path, kernel: dict[str, str]) -> dict[str, str]:
    """The same where each controller has a hierarchy of its own."""
    for controller in ("memory", "cpu", "pids", "devices"):
        (tmp_path / controller / "megaflow-x").mkdir(parents=True)
    return kernel


@pytest.mark.parametrize("counts_swap", [True, False])
def test_version_1_limits_memory_with_swap_cpu_processes_and_devices(
    tmp_path: Path, version_1: dict[str, str], counts_swap: bool
) -> None:
    if counts_swap:
        (tmp_path / "memory/megaflow-x/memory.memsw.limit_in_bytes").touch()
    Cgroup("x").make(LIMITS)
    assert version_1["memory/megaflow-x/memory.limit_in_bytes"] == str(64 << 20)
    assert ("memory/megaflow-x/memory.memsw.limit_in_bytes" in version_1) == counts_swap
    assert version_1["cpu/megaflow-x/cpu.cfs_quota_us"] == "50000"
    assert version_1["pids/megaflow-x/pids.max"] == "77"
    assert Cgroup("x").pids_folder == tmp_path / "pids/megaflow-x"
    assert version_1["devices/megaflow-x/devices.deny"] == "a"
    assert version_1["devices/megaflow-x/devices.allow"] == " ".join(cgroups.DEVICES)
    assert version_1["cpu/megaflow-x/cpu.cfs_period_us"] == "100000"


def test_what_nobody_is_in_is_removed_and_what_somebody_is_in_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    places = [tmp_path / controller / "megaflow-x" for controller in ("memory", "pids", "freezer")]
    for place in places:
        place.mkdir(parents=True)
    (places[0] / "busy").touch()  # the kernel refuses for processes as a disk does for files
    assert not Cgroup("x").remove(timeout_s=0.0)
    assert [place.exists() for place in places] == [True, False, False]
    (places[0] / "busy").unlink()
    assert Cgroup("x").remove(timeout_s=0.0)
    assert Cgroup("x").remove(timeout_s=0.0), "it is not there"


def test_version_2_has_its_controllers_enabled_and_one_folder(tmp_path: Path, kernel: dict[str, str]) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids")
    (tmp_path / "cgroup.subtree_control").write_text("io memory")
    (tmp_path / "megaflow-x").mkdir()
    (tmp_path / "megaflow-x" / "memory.swap.max").touch()
    group = Cgroup("x")
    group.make(LIMITS)
    assert kernel["cgroup.subtree_control"] == "+cpu +pids"
    assert kernel["megaflow-x/memory.max"] == str(64 << 20)
    assert kernel["megaflow-x/memory.swap.max"] == "0"
    assert kernel["megaflow-x/cpu.max"] == "50000 100000"
    assert kernel["megaflow-x/pids.max"] == "77"
    assert group.pids_folder == tmp_path / "megaflow-x"
    with group.joined() as prefix:
        assert prefix[:2] == ["/bin/sh", "-c"]
        assert str(tmp_path / "megaflow-x" / "cgroup.procs") in prefix[2]


@pytest.mark.parametrize("unified", [True, False])
def test_what_a_deleted_home_left_is_removed_and_what_lives_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    place = tmp_path if unified else tmp_path / "memory"
    if unified:
        (tmp_path / "cgroup.controllers").touch()
    abandoned, inner, living, young, foreign = (
        place / name for name in ("megaflow-a", "megaflow-a/runtime", "megaflow-b", "megaflow-c", "docker")
    )
    for folder in (abandoned, inner, living, young, foreign):
        folder.mkdir(parents=True)
    (living / "busy").touch()  # the kernel refuses for processes as a disk does for files
    for folder in (abandoned, living, foreign):
        os.utime(folder, (1, 1))
    assert cgroups.remove_abandoned() == 1
    assert sorted(folder.name for folder in place.iterdir() if folder.is_dir()) == [
        "docker",
        "megaflow-b",
        "megaflow-c",
    ]


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


def _none() -> None:
    return None


def test_a_kill_is_reported_once(counter: Counter) -> None:
    watch = MemoryWatch(counter.file, _none)
    reported = []
    for kills in (0, 1, 1, 3, 3):
        counter.set(kills)
        reported.append(watch.killed(suspected=False))
    assert reported == [False, True, False, True, False]


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
    assert (watch.killed(suspected=True), watch.count(), watch.host_kills()) == (False, 0, 2)
    show(full=True)
    assert (watch.killed(suspected=True), watch.count(), watch.host_kills()) == (True, 2, 0)


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
    assert watch.host_kills() == int(not counts)


def _group(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pids.events").write_text(content)
    return folder


def test_what_all_its_groups_have_refused_is_added_up_and_followed(tmp_path: Path) -> None:
    own = _group(tmp_path / "own", "max 0\n")
    watch = PidsWatch([own, own / "nested"])
    assert watch.refused() == 0
    _group(own, "max 3\n")
    _group(own / "nested", "max 4\n")
    assert watch.refused() == 7


def test_usage_is_read_from_either_version_and_none_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    for name, text in (
        ("two/memory.current", "4096\n"), ("two/cpu.stat", "usage_usec 2500000\nuser_usec 1\n"),
        ("memory/x/memory.usage_in_bytes", "8192\n"), ("cpu/x/cpu.stat", "nr_periods 0\nthrottled_time 0\n"),
        ("cpuacct/x/cpuacct.usage", "1500000000\n"), ("cpu/joint/cpuacct.usage", "500000000\n"),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usage(tmp_path / "two", (tmp_path / "two",)) == GroupUsage(4096, 2.5)
    assert usage(tmp_path / "memory/x", (tmp_path / "cpu/x",)) == GroupUsage(8192, 1.5)
    assert usage(None, (tmp_path / "gone", tmp_path / "cpu/joint")) == GroupUsage(None, 0.5)
    assert usage(None, ()) is None
    (tmp_path / "memory/x/cgroup.procs").write_text(f"{os.getpid()}\n4194305\n")
    alone = usage(tmp_path / "memory/x", (tmp_path / "gone",))
    assert alone is not None
    assert 0 < (alone.cpu_s or 0) <= sum(os.times()[:4]) + 0.1, "by its processes, of which one has ended"
    assert usage(tmp_path / "gone", (tmp_path / "gone",)) is None


def test_a_group_around_others_leaves_the_devices_to_those_above(version_1: dict[str, str]) -> None:
    """The kernel refuses a container below it that may use one more."""
    Cgroup("x").make(LIMITS, devices=None)
    assert version_1["memory/megaflow-x/memory.limit_in_bytes"] == str(64 << 20)
    assert not [name for name in version_1 if name.startswith("devices/")]
