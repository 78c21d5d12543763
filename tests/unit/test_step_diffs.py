"""The repository's diff after each step. Real git; what the agent has stays as it is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from app.agents import patch as step_diffs
from app.agents.patch import StepDiffs, head_commit
from app.models.shell import CommandResult
from tests.unit.folder_shell import FolderShell, committed, git

WORKDIR = "/testbed"


@pytest.fixture
def shell(tmp_path: Path) -> FolderShell:
    shell = FolderShell(tmp_path / "environment")
    committed(shell.path(WORKDIR), {"value.py": "value = 1\n", "gone.py": "x = 1\n"})
    return shell


def _made(shell: FolderShell) -> tuple[StepDiffs, Path]:
    return StepDiffs(shell, WORKDIR, head_commit(shell, WORKDIR)), shell.path(WORKDIR)


def _lines(diffs: StepDiffs) -> list[Any]:
    return [orjson.loads(line) for line in diffs.content().splitlines()]


def test_each_step_has_the_diff_of_all_that_changed_since_the_begin(shell: FolderShell) -> None:
    diffs, folder = _made(shell)
    diffs.take()
    (folder / "value.py").write_text("value = 2\n")
    git(folder, "config", "diff.noprefix", "true")
    git(folder, "config", "diff.external", "false")
    diffs.take()
    diffs.take()  # nothing new
    (folder / "new.py").write_text("y = 1\n")
    (folder / "gone.py").unlink()
    git(folder, "add", "--all")
    git(folder, "commit", "-qm", "all")  # against the base all the same
    diffs.take()
    first, second = _lines(diffs)
    assert first["diff"].startswith("diff --git a/value.py b/value.py\n")
    assert "new.py" not in first["diff"]
    for part in ("-value = 1\n+value = 2\n", "+++ b/new.py\n@@ -0,0 +1 @@\n+y = 1", "--- a/gone.py\n+++ /dev/null"):
        assert part in second["diff"]


def test_index_objects_and_files_of_the_agent_stay_as_they_are(shell: FolderShell) -> None:
    diffs, folder = _made(shell)
    (folder / "value.py").write_text("value = 3\n")
    (folder / "new.py").write_text("y = 1\n")
    git(folder, "add", "value.py")
    os.utime(folder / "gone.py")  # its time alone: git would renew its index for that
    (folder / ".git" / "index.lock").touch()  # of a git that was killed
    before = {str(one): (one.stat().st_mtime_ns, one.stat().st_size) for one in folder.rglob("*")}
    diffs.take()
    assert {str(one): (one.stat().st_mtime_ns, one.stat().st_size) for one in folder.rglob("*")} == before
    assert "+value = 3" in _lines(diffs)[0]["diff"]
    assert not Path(diffs._scratch).exists()


def test_size_is_bounded(shell: FolderShell, monkeypatch: pytest.MonkeyPatch) -> None:
    diffs, folder = _made(shell)
    (folder / "large.txt").write_text("line\n" * (1 << 20))
    diffs.take()
    assert "Binary files /dev/null and b/large.txt differ" in _lines(diffs)[0]["diff"]
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"{number} line\n" * 50_000)
    diffs.take()
    assert (_lines(diffs)[-1]["cut"], len(_lines(diffs)[-1]["diff"])) == (True, 128 << 10)
    monkeypatch.setattr(step_diffs, "_TOTAL_BYTES", 1000)
    (folder / "value.py").write_text("value = 9\n")
    (folder / "0.txt").unlink()
    diffs.take()
    diffs.take()
    assert [one.get("missing", "")[:27] for one in _lines(diffs)] == ["", "", "the diffs of this attempt a"]


def test_time_is_bounded(shell: FolderShell, monkeypatch: pytest.MonkeyPatch) -> None:
    (diffs, _), calls = _made(shell), []

    def slow(command: str, **_: Any) -> CommandResult:
        calls.append(command)
        return CommandResult(None, b"", b"", timed_out=True, truncated=False, duration_s=10)

    monkeypatch.setattr(shell, "run", slow)
    clock = iter([100.0, 100.0, 110.0, 111.0, 300.0, 300.0, 310.0])
    monkeypatch.setattr(step_diffs, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: next(clock)))
    for expected in (2, 2, 4):  # the diff, and the removal of what it left; a second later nothing
        diffs.take()
        assert len(calls) == expected
    assert all("more than 10 s" in one["missing"] for one in _lines(diffs))


def test_without_a_repository_it_says_so_once(tmp_path: Path) -> None:
    diffs = StepDiffs(FolderShell(tmp_path / "environment"), WORKDIR, None)
    diffs.take()
    diffs.take()
    assert [one["missing"] for one in _lines(diffs)] == ["no repository is there"]


def test_while_a_program_runs_inside_changes_are_seen(shell: FolderShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_diffs, "_EVERY_S", 0.05)
    diffs, folder = _made(shell)
    with diffs.recording():
        (folder / "value.py").write_text("value = 5\n")
        until = time.monotonic() + 20
        while b"value = 5" not in diffs.content() and time.monotonic() < until:
            time.sleep(0.02)
        (folder / "value.py").write_text("value = 7\n")
    assert [one["diff"].splitlines()[-1] for one in _lines(diffs)] == ["+value = 5", "+value = 7"]
