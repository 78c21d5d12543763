"""Starting and stopping a Docker engine of ours: a private one, in mount and network namespaces of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.settings import Settings
from app.stack import engine, packages, tools
from app.stack.engine import Dockerd
from tests.services import short_folder

can_start = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("dockerd") or not shutil.which("unshare"),
    reason="starting an engine takes root, dockerd and unshare",
)


def private(folder: Path, *options: str) -> Dockerd:
    """An engine beside the machine's: with namespaces of its own, so that neither takes anything from the other."""
    url = f"unix://{folder}/d.sock"
    roots = ("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/d.pid")
    command = ("unshare", "-m", "-n", "dockerd", "-H", url, *roots, *options)
    return Dockerd(command=command, url=url, pidfile=folder / "d.pid", exec_root=folder / "exec")


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def settings(folder: Path) -> Iterator[Settings]:
    chosen = Settings(home=folder / "h", docker_url=f"unix://{folder}/d.sock")
    yield chosen
    engine.stop_engine(chosen)
    assert _processes_of(folder) == []


def _processes_of(folder: Path) -> list[str]:
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [" ".join(command) for command in commands if any(str(folder) in part for part in command)]


@can_start
def test_an_engine_is_started_found_again_and_stopped_with_its_containerd(folder: Path, settings: Settings) -> None:
    lines: list[str] = []
    started = engine.ensure_engine(settings, may_install=False, dockerd=private(folder), report=lines.append)
    assert started.available, started.why
    assert started.started
    assert started.version
    assert any("starting" in line for line in lines)
    assert any("containerd" in line for line in _processes_of(folder))

    again = engine.ensure_engine(settings, may_install=False, dockerd=private(folder))
    assert again.available
    assert not again.started

    assert engine.stop_engine(settings)
    assert not _processes_of(folder)
    assert engine.version(settings) is None
    assert not engine.stop_engine(settings), "a second stop finds nothing of ours"


@can_start
@pytest.mark.parametrize("program", ["dockerd", "containerd"])
def test_a_pid_file_with_a_strangers_number_does_not_keep_the_engine_from_starting(
    folder: Path, settings: Settings, program: str
) -> None:
    dockerd = private(folder)
    dockerd.pidfiles[program].parent.mkdir(parents=True, exist_ok=True)
    dockerd.pidfiles[program].write_text(str(os.getpid()))
    report = engine.ensure_engine(settings, may_install=False, dockerd=dockerd)
    assert report.available, report.why


@can_start
def test_an_engine_that_was_killed_is_started_again_at_once(folder: Path, settings: Settings) -> None:
    dockerd = private(folder)
    assert engine.ensure_engine(settings, may_install=False, dockerd=dockerd).started
    killed = psutil.Process(int(dockerd.pidfile.read_text()))
    killed.kill()
    killed.wait(10)
    report = engine.ensure_engine(settings, may_install=False, dockerd=dockerd)
    assert report.started, report.why


@pytest.mark.docker
def test_the_engine_that_was_there_is_used_and_never_ours_to_stop(folder: Path, docker_engine: str) -> None:
    settings = Settings(home=folder / "h")
    report = engine.ensure_engine(settings, may_install=False)
    assert report == engine.EngineReport(available=True, version=docker_engine)
    assert not engine.is_ours(settings)
    assert not engine.stop_engine(settings)
    assert engine.version(settings) == docker_engine


def test_what_is_missing_is_brought_once_and_named_when_it_cannot_be(
    home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def refuse(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[bytes]:
        assert "OPENAI_API_KEY" not in env
        calls.append(command)
        return subprocess.CompletedProcess(command, 100)

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(tools, "PROGRAMS", ("no-such-program",))
    monkeypatch.setattr(packages.subprocess, "run", refuse)
    monkeypatch.setattr(tools.shutil, "which", lambda name: None if name == "no-such-program" else f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    settings, said = Settings(home=home_folder), list[str]()
    tools.ensure_tools(settings, may_install=True, report=said.append)
    assert [command[1] for command in calls] == ["install", "update", "install"]
    assert "no-such-program" in said[0]
    tools.ensure_tools(settings, may_install=True, report=said.append)
    assert len(calls) == 3, "an index that is out of reach is not asked at every start"
