"""Set-up commands: in their order, and what becomes of one that fails, hangs or writes too much."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from app.environments.runtimes.setup import carry_out
from app.errors import EnvironmentOverLimit, SetupFailed
from app.models.shell import CommandResult
from tests.unit.folder_shell import FolderShell


@pytest.fixture
def shell(tmp_path: Path) -> FolderShell:
    return FolderShell(tmp_path)


def test_one_that_fails_is_told_with_its_code_and_the_end_of_its_output_and_no_other_follows(
    shell: FolderShell,
) -> None:
    commands = ("echo x > first", "seq 100000; echo sorry >&2; exit 3", "echo x > third")
    with pytest.raises(SetupFailed, match=r"(?s)^set-up command 'seq .*exit 3': exit code 3: .*sorry$") as caught:
        carry_out(commands, shell, time.monotonic() + 30)
    assert len(str(caught.value)) < 2200
    assert shell.path("/testbed/first").exists()
    assert not shell.path("/testbed/third").exists()


def test_one_that_writes_more_than_the_task_may_would_do_so_again(tmp_path: Path) -> None:
    class Full(FolderShell):
        def run(self, command: str, **_: object) -> CommandResult:
            raise EnvironmentOverLimit("environment x was ended: disk limit of 1 bytes reached.")

    with pytest.raises(SetupFailed, match=r"set-up command 'fill it': .*disk limit"):
        carry_out(("fill it",), Full(tmp_path), time.monotonic() + 30)
