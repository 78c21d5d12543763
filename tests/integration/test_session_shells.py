"""Shells that remember and programs that are talked to, over a real session helper."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments.prebuilt import binary
from app.environments.session.client import SessionClient
from app.environments.session.connection import HelperConnection
from app.environments.session.shells import ShellSession
from app.errors import EnvironmentFailed
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


def test_what_came_between_two_commands_makes_no_log_that_would_not_be_whole(
    client: SessionClient, tmp_path: Path
) -> None:
    shell = client.shell(limit_bytes=100)
    client.logs = CommandLogs(tmp_path, 1 << 20)
    try:
        shell.run("{ sleep 0.3; seq 1000; } &", timeout_s=10)
        time.sleep(1.0)
        result = shell.run("seq 1000", timeout_s=10)
        assert (result.truncated, result.logs) == (True, ())
    finally:
        client.logs = None
        shell.close()


def test_the_descriptors_that_scripts_like_are_theirs(shell: ShellSession, tmp_path: Path) -> None:
    for number in (3, 7, 8, 9):
        shell.run(f"exec {number}>{tmp_path}/{number}", timeout_s=10)
    assert said(shell, "echo here >&9; echo there >&3; echo still") == b"still\n"
    assert ((tmp_path / "9").read_bytes(), (tmp_path / "3").read_bytes()) == (b"here\n", b"there\n")


def test_a_syntax_error_is_an_answer(shell: ShellSession) -> None:
    result = shell.run("if then", timeout_s=10)
    assert (result.exit_code, b"yntax" in result.stderr) == (2, True)
    assert said(shell, "pwd") == b"/usr\n"


def test_a_loop_of_the_shell_itself_runs_out_of_time_too(shell: ShellSession) -> None:
    assert shell.run("cd /etc; trap '' TERM; while :; do :; done", timeout_s=0.3).timed_out
    assert said(shell, "echo alive") == b"alive\n"


def test_a_shell_whose_carrier_was_killed_is_replaced(client: SessionClient) -> None:
    shell = client.shell()
    assert shell.run("kill -9 $PPID; sleep 30", timeout_s=10).exit_code == 137
    assert said(shell, "echo new") == b"new\n"
    shell.close()


def test_what_a_closed_shell_left_running_lives_on(client: SessionClient) -> None:
    shell = client.shell()
    shell.run("(while :; do echo noise; sleep 0.01; done) & exec 2>/dev/null; sleep 5151 &", timeout_s=10)
    shell.close()
    shell.close()
    with pytest.raises(EnvironmentFailed, match="closed"):
        shell.run("true", timeout_s=5)
    time.sleep(0.1)
    assert client.run("pkill -f '[s]leep 5151'", timeout_s=10).ok
    client.kill_all()


def test_what_is_no_shell_is_refused(client: SessionClient) -> None:
    for program in ("/not/there", "/bin/false"):
        with pytest.raises(EnvironmentFailed, match=program):
            client.shell(program=program)
    with pytest.raises(EnvironmentFailed, match="/no/folder"):
        client.shell(cwd="/no/folder")


def test_another_users_shell_works(client: SessionClient) -> None:
    shell = client.shell(user="nobody", cwd="/")
    assert said(shell, "id -u; echo fine > /dev/stdout") == b"65534\nfine\n"
    shell.close()


def test_much_goes_both_ways_at_once(client: SessionClient) -> None:
    stream = client.stream(["cat"])
    sent = bytes(range(256)) * 20_000
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(lambda: (stream.write(sent), stream.close_input()))
        got = b"".join(iter(lambda: stream.read(5) or b"", b""))
        writing.result(timeout=20)
    assert got == sent
    assert stream.wait(5) == 0
    stream.close()


def test_a_reader_that_is_about_to_wait_when_it_is_closed_waits_for_nobody_else(
    client: SessionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = client.stream(["sleep", "60"])
    about, go_on, wait = threading.Event(), threading.Event(), HelperConnection.wait

    def held_up(connection: HelperConnection, timeout_s: float | None) -> bool:
        about.set()
        assert go_on.wait(20)
        return wait(connection, timeout_s)

    monkeypatch.setattr(HelperConnection, "wait", held_up)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(stream.read)
        assert about.wait(20)
        stream.close()
        pairs = [socket.socketpair() for _ in range(20)]  # one of these has the number that the stream's had
        go_on.set()
        try:
            assert reading.result(timeout=20) == b""
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()
    assert stream.read() == b""
    stream.write(b"to nobody")
    stream.close()
