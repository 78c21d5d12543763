"""The shipped programs: built from the sources beside them, for both machines, and the same when built again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments import prebuilt
from app.environments.prebuilt import BUILT, HERE, MACHINES, SOURCES, HelperUnavailable, binary, content, source_digest
from app.environments.session.client import SessionClient
from tests.services import missing

ABOUT = json.loads(BUILT.read_text())
SCRIPT = Path(__file__).parents[2] / "scripts" / "build_programs.py"


@pytest.mark.parametrize("program", SOURCES)
def test_the_programs_are_those_of_the_sources(program: str) -> None:
    assert source_digest(program) == ABOUT["sources"][program], "the sources were changed: run `make helper`"
    for machine in MACHINES:
        found = (HERE / f"{program}-{machine}").read_bytes()
        assert hashlib.sha256(found).hexdigest() == ABOUT["programs"][f"{program}-{machine}"]["sha256"]
        assert content(program, machine) == found


def test_it_is_copied_once_whoever_asks_and_can_be_executed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        paths = {made.result() for made in [threads.submit(binary, tmp_path) for _ in range(8)]}
    (path,) = paths
    assert os.access(path, os.X_OK)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert binary(tmp_path, "aarch64").name.endswith("-aarch64")


def test_another_machine_and_a_changed_program_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HelperUnavailable, match="found 'riscv64'"):
        binary(tmp_path, "riscv64")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(prebuilt, "HERE", tmp_path)
    (tmp_path / "helper-x86_64").write_bytes(b"another")
    with pytest.raises(HelperUnavailable, match="not the program that was built"):
        content("helper", "x86_64")


@pytest.mark.extra
def test_they_are_the_same_when_they_are_built_again(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    if done.returncode == 69:
        missing(f"the compilers: {done.stderr}")
    assert done.returncode == 0, done.stderr
    built = json.loads((tmp_path / BUILT.name).read_text())
    for name, about in built["programs"].items():
        if about["compiler"] != ABOUT["programs"][name]["compiler"]:
            pytest.skip(f"another compiler: {about['compiler']}")
    assert built == ABOUT


@pytest.mark.extra
def test_the_one_for_arm64_serves_commands(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        missing("an emulator of arm64 (Debian: qemu-user-static)")
    program = binary(tmp_path, "aarch64")
    lanes: list[subprocess.Popen[bytes]] = []

    def connect() -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            lanes.append(subprocess.Popen([str(emulator), str(program), "--stdio"], stdin=theirs, stdout=theirs))
        ours.setblocking(False)
        return ours

    client = SessionClient(connect, label="arm64", cwd=str(tmp_path))
    try:
        client.wait_ready(20)
        client.put(f"{tmp_path}/a", b"from arm64")
        result = client.run("cat a; exit 3", timeout_s=30)
        assert (result.exit_code, result.stdout) == (3, b"from arm64")
    finally:
        client.close()
        for lane in lanes:
            lane.wait(20)
