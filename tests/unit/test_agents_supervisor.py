"""Keepers: of what they run nothing is left, whatever happens to them, to it, or to whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.agents.framework import Stop
from app.agents.installation import once
from app.agents.installation.once import ToolStore, step
from app.agents.running.clock import Clock
from app.agents.running.outputs import Outputs
from app.agents.running.outside import run_outside
from app.errors import AgentUnavailable
from megaflow.contract.agents.trial import NeverCancelled
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


def lives(pid: str) -> bool:
    """And has not only to be waited for by whoever has adopted it."""
    try:
        return Path("/proc", pid.strip(), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_supervisor_that_fails_ends_its_program(tmp_path: Path) -> None:
    code = (
        "import os, sys; from app.agents.running import supervisor\n"
        "def fail(*_): raise RuntimeError('unforeseen')\n"
        "supervisor.ChildProgram.await_end = fail\n"
        "supervisor.main(os.pipe()[0], os.pipe()[1], 1.0, ['sleep', '1000'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "unforeseen" in done.stderr  # and its outputs have ended: nobody holds them


def test_an_orphan_of_a_killed_supervisor_does_not_hold_us(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    script = 'echo $$ >"$1"; echo said; kill -9 $PPID; exec sleep 30'
    by, code = run_outside(
        ["/bin/sh", "-c", script, "sh", str(tmp_path / "pid")],
        env={"PATH": "/usr/bin:/bin"}, cwd=str(tmp_path), stdin=b"", outputs=outputs,
        clock=Clock(60.0, lambda: 0.0), cancel=NeverCancelled(),
    )  # fmt: skip
    outputs.close()
    orphan = (tmp_path / "pid").read_text()
    assert lives(orphan), "we were back before it let go of its output"
    os.kill(int(orphan), 9)
    assert (by, code) == (Stop.ITSELF, -9)
    assert (tmp_path / "stdout").read_text() == "said\n"


def test_a_step_that_takes_too_long_goes_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_STEP_TIMEOUT_S", 4.0)
    script = f"trap '' TERM; setsid sleep 1000 & echo $! >{tmp_path}/child; wait"
    with pytest.raises(AgentUnavailable, match="no end within 4 s"):
        step("toy", ["sh", "-c", script])
    assert not lives((tmp_path / "child").read_text())


def test_a_step_leaves_nothing_in_the_background(tmp_path: Path) -> None:
    assert step("toy", ["sh", "-c", "sleep 1000 & echo $!; echo lost >&2"], cwd=tmp_path)
    pid = step("toy", ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"])
    assert not lives(pid)


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["sh", "-c", "echo why >&2; exit 3"], "exit code 3: why"), (["/nowhere/at/all"], "No such file")],
)
def test_a_step_that_fails_says_why(argv: list[str], words: str) -> None:
    with pytest.raises(AgentUnavailable, match=words):
        step("toy", argv)


INSTALLER = """
import sys
from pathlib import Path
from app.agents.installation.once import ToolStore, step
def make(place):
    script = 'trap "" TERM; echo $$ >"$1"; while :; do echo more >>"$2/file"; sleep 0.02; done'
    step("toy", ["sh", "-c", script, "sh", sys.argv[2], str(place)])
ToolStore(Path(sys.argv[1])).ensure("toy", "1", make)
"""


def test_whoever_installs_after_a_killed_one_finds_nobody_writing(tmp_path: Path) -> None:
    tool_store, file = tmp_path / "tool_store", tmp_path / "pid"
    first = subprocess.Popen([sys.executable, "-c", INSTALLER, str(tool_store), str(file)], cwd=ROOT)
    eventually(lambda: file.exists() and bool(file.read_text().strip()))
    first.kill()
    first.wait()
    found: list[bool] = []

    def make(place: Path) -> None:
        found.append(lives(file.read_text()))
        (place / "own").touch()

    place = ToolStore(tool_store).ensure("toy", "1", make)
    assert found == [False]
    assert {path.name for path in place.iterdir()} == {"own", ".complete"}
