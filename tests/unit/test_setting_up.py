"""Set-up commands: in their order, and what becomes of one that fails, hangs or writes too much."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from app.environments.runtimes.setup import carry_out
from app.errors import EnvironmentOverLimit, SetupFailed, SetupTimedOut
from app.models.shell import CommandResult
from tests.unit.folder_shell import FolderShell


@pytest.fixture
def shell(tmp_path: Path) -> FolderShell:
    return FolderShell(tmp_path)


def test_commands_run_in_their_order(shell: FolderShell) -> None:
    carry_out(("echo one >> said", "echo two >> said"), shell, time.monotonic() + 30)
    assert shell.get("/testbed/said") == b"one\ntwo\n"


def test_one_that_fails_is_told_with_its_code_and_the_end_of_its_output_and_no_other_follows(
    shell: FolderShell,
) -> None:
    commands = ("echo x > first", "seq 100000; echo sorry >&2; exit 3", "echo x > third")
    with pytest.raises(SetupFailed, match=r"(?s)^set-up command 'seq .*exit 3': exit code 3: .*sorry$") as caught:
        carry_out(commands, shell, time.monotonic() + 30)
    assert len(str(caught.value)) < 2200
    assert shell.path("/testbed/first").exists()
    assert not shell.path("/testbed/third").exists()


def test_one_that_hangs_is_stopped_when_the_environments_time_is_over(shell: FolderShell) -> None:
    begun = time.monotonic()
    with pytest.raises(SetupTimedOut, match=r"(?s)'echo begun; sleep 60': ran out of .*time: begun$"):
        carry_out(("echo begun; sleep 60",), shell, begun + 0.5)
    assert time.monotonic() - begun < 20


def test_a_failure_without_a_word_says_so(shell: FolderShell) -> None:
    with pytest.raises(SetupFailed, match=r"^set-up command false: exit code 1: \(no output\)$"):
        carry_out(("false",), shell, time.monotonic() + 30)


def test_one_that_writes_more_than_the_task_may_would_do_so_again(tmp_path: Path) -> None:
    class Full(FolderShell):
        def run(self, command: str, **_: object) -> CommandResult:
            raise EnvironmentOverLimit("environment x was ended: disk limit of 1 bytes reached.")

    with pytest.raises(SetupFailed, match=r"set-up command 'fill it': .*disk limit"):
        carry_out(("fill it",), Full(tmp_path), time.monotonic() + 30)
