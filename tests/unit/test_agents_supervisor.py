"""Keepers: of what they run nothing is left, whatever happens to them, to it, or to whoever started them."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.agents.framework import Stop
from app.agents.installation import once
from app.agents.installation.once import ToolStore, run_bounded, step
from app.agents.running import supervisor
from app.agents.running.clock import Clock
from app.agents.running.outputs import Output, Outputs
from app.agents.running.outside import run_outside
from app.errors import AgentUnavailable
from app.workers.command_logs import CommandLogs
from megaflow.contract.agents.trial import NeverCancelled
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
HIGH = 1500  # above what `select` knows


def lives(pid: str) -> bool:
    """And has not only to be waited for by whoever has adopted it."""
    try:
        return Path("/proc", pid.strip(), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= HIGH:
        pytest.skip("this host allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 100), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_supervisor_works_whatever_the_numbers_of_its_files(many_files: None) -> None:
    control, stopping = os.pipe()
    status, telling = os.pipe()
    high = fcntl.fcntl(control, fcntl.F_DUPFD, HIGH)
    argv = [sys.executable, "-I", "-S", supervisor.__file__, str(high), str(telling), "5", "sleep", "1000"]
    with subprocess.Popen(argv, pass_fds=(high, telling), stderr=subprocess.PIPE) as process:
        for number in (control, high, telling):
            os.close(number)
        os.close(stopping)
        with open(status) as told:
            assert told.read() == "ended -15\n"
        assert process.wait(60) == 0


def test_a_supervisor_that_fails_ends_its_program(tmp_path: Path) -> None:
    code = (
        "import os, sys; from app.agents.running import supervisor\n"
        "def fail(*_): raise RuntimeError('unforeseen')\n"
        "supervisor.ChildProgram.await_end = fail\n"
        "supervisor.main(os.pipe()[0], os.pipe()[1], 1.0, ['sleep', '1000'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "unforeseen" in done.stderr  # and its outputs have ended: nobody holds them


def test_what_a_program_gets_are_its_three_streams(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
        done = run_bounded([sys.executable, "-c", code], env=None, cwd=None, timeout_s=60, locks=[lock.fileno()])
    assert done.stdout == "[0, 1, 2]\n"


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


def test_all_of_an_output_that_is_too_long_is_kept_where_there_are_logs(tmp_path: Path) -> None:
    lines = [b"line %06d\n" % number for number in range(2000)]
    logs = CommandLogs(tmp_path / "logs", 1 << 20)
    output = Output(tmp_path / "stdout", head_bytes=5000, tail_bytes=2000, logs=logs)
    for line in lines:
        output.write(line)
    output.close()
    assert (tmp_path / "logs" / "0001.stdout").read_bytes() == b"".join(lines)
    assert "left out here; all of it is 0001.stdout in the attempt's command_logs]" in output.file.read_text()
    assert output.file.stat().st_size < 10_000


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


def test_a_bundle_is_made_at_the_folders_own_path_whoever_comes_by_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    links = [tmp_path / name for name in ("one", "two")]
    for link in links:
        link.symlink_to(kept)
    made: list[Path] = []
    places = [ToolStore(link).ensure("tool", "abc", lambda place: made.append(place)) for link in links]
    assert places == [kept / "tool-abc"] * 2
    assert made == [kept / "tool-abc"], "programs of a virtual environment name its path: a link may be gone tomorrow"
