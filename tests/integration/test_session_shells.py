"""Shells that remember and programs that are talked to, over a real session helper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.environments.prebuilt import binary
from app.environments.session.client import SessionClient
from app.environments.session.shells import ShellSession
from app.workers.command_logs import CommandLogs
from tests.integration.session_fixture import fixture, may_unshare


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionClient]:
    program = binary(tmp_path_factory.mktemp("home"))
    with fixture(program, as_init=may_unshare()) as made:
        yield made.client()


@pytest.fixture(params=["sh", "bash"])
def shell(request: pytest.FixtureRequest, client: SessionClient) -> Iterator[ShellSession]:
    program = shutil.which(request.param)
    if program is None:
        pytest.skip(f"no {request.param} here")
    made = client.shell(program=program, cwd="/usr", env={"GIVEN": "by the session"})
    yield made
    made.close()


def said(shell: ShellSession, command: str) -> bytes:
    result = shell.run(command, timeout_s=10)
    return result.stdout + result.stderr


def test_all_of_a_long_output_is_kept_where_there_are_logs(client: SessionClient, tmp_path: Path) -> None:
    shell = client.shell(limit_bytes=100)
    client.logs = CommandLogs(tmp_path, 1 << 20)
    try:
        assert shell.run("seq 10", timeout_s=10).logs == ()
        for number in (1, 2):
            result = shell.run(f"export A={number}; seq 10000", timeout_s=10)
            assert result.logs == (f"{number:04}.stdout",)
            assert (tmp_path / result.logs[0]).read_bytes() == b"".join(b"%d\n" % n for n in range(1, 10001))
        assert said(shell, "echo $A") == b"2\n"
    finally:
        client.logs = None
        shell.close()


def test_a_loop_of_the_shell_itself_runs_out_of_time_too(shell: ShellSession) -> None:
    assert shell.run("cd /etc; trap '' TERM; while :; do :; done", timeout_s=0.3).timed_out
    assert said(shell, "echo alive") == b"alive\n"


def test_a_shell_whose_carrier_was_killed_is_replaced(client: SessionClient) -> None:
    shell = client.shell()
    assert shell.run("kill -9 $PPID; sleep 30", timeout_s=10).exit_code == 137
    assert said(shell, "echo new") == b"new\n"
    shell.close()


def test_another_users_shell_works(client: SessionClient) -> None:
    shell = client.shell(user="nobody", cwd="/")
    assert said(shell, "id -u; echo fine > /dev/stdout") == b"65534\nfine\n"
    shell.close()
