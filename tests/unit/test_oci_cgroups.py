"""Limits, written for either version of the kernel's control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.host import cgroups
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


@pytest.mark.parametrize("counts_swap", [True, False])
def test_version_1_limits_memory_with_swap_cpu_processes_and_devices(
    tmp_path: Path, kernel: dict[str, str], counts_swap: bool
) -> None:
    for controller in ("memory", "cpu", "pids", "devices"):
        (tmp_path / controller / "megaflow-x").mkdir(parents=True)
    if counts_swap:
        (tmp_path / "memory/megaflow-x/memory.memsw.limit_in_bytes").touch()
    Cgroup("x").make(LIMITS)
    assert kernel["memory/megaflow-x/memory.limit_in_bytes"] == str(64 << 20)
    assert ("memory/megaflow-x/memory.memsw.limit_in_bytes" in kernel) == counts_swap
    assert kernel["cpu/megaflow-x/cpu.cfs_quota_us"] == "50000"
    assert kernel["pids/megaflow-x/pids.max"] == "77"
    assert Cgroup("x").pids_folders == (tmp_path / "pids/megaflow-x", tmp_path / "pids/megaflow-x/runtime")
    assert kernel["devices/megaflow-x/devices.deny"] == "a"
    assert kernel["devices/megaflow-x/devices.allow"] == " ".join(cgroups.DEVICES)
    assert kernel["cpu/megaflow-x/cpu.cfs_period_us"] == "100000"


def test_a_group_around_others_leaves_the_devices_to_those_above(tmp_path: Path, kernel: dict[str, str]) -> None:
    """The kernel refuses a container below it that may use one more."""
    for controller in ("memory", "cpu", "pids", "devices"):
        (tmp_path / controller / "megaflow-x").mkdir(parents=True)
    Cgroup("x").make(LIMITS, devices=None)
    assert kernel["memory/megaflow-x/memory.limit_in_bytes"] == str(64 << 20)
    assert not [name for name in kernel if name.startswith("devices/")]


@pytest.mark.parametrize("cpus", [0.29, 0.57, 1.1])
def test_a_quota_is_no_less_than_what_an_engine_makes_of_the_same(
    tmp_path: Path, kernel: dict[str, str], monkeypatch: pytest.MonkeyPatch, cpus: float
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for controller in ("memory", "cpu", "pids", "devices"):
        (tmp_path / controller / "megaflow-x").mkdir(parents=True)
    Cgroup("x").make(Resources(cpus=cpus, memory_bytes=64 << 20, pids=77))
    assert int(kernel["cpu/megaflow-x/cpu.cfs_quota_us"]) >= int(cpus * 1e9) * 100_000 // 10**9


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
    assert group.pids_folders == (tmp_path / "megaflow-x", tmp_path / "megaflow-x" / "runtime")
    with group.joined() as prefix:
        assert prefix[:2] == ["/bin/sh", "-c"]
        assert str(tmp_path / "megaflow-x" / "cgroup.procs") in prefix[2]


def test_who_may_have_all_processors_is_told_how_many(tmp_path: Path, kernel: dict[str, str]) -> None:
    for controller in ("memory", "cpu", "pids", "devices"):
        (tmp_path / controller / "megaflow-x").mkdir(parents=True)
    Cgroup("x").make(Resources(cpus=256, memory_bytes=64 << 20, pids=77))
    assert kernel["cpu/megaflow-x/cpu.cfs_quota_us"] == str((os.cpu_count() or 1) * 100_000)


def test_a_process_of_another_group_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    for controller in ("memory", "cpu", "pids", "devices"):
        (tmp_path / controller / "megaflow-x").mkdir(parents=True)
        (tmp_path / controller / "megaflow-x" / "cgroup.procs").write_text(f"1\n{os.getpid()}\n{os.getppid()}\n")
    assert Cgroup("x").processes() == []


def test_ending_what_is_not_there_is_fine() -> None:
    assert Cgroup("no-such-environment").end(timeout_s=1.0)


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
