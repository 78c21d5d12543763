"""Contract of stateful shells: folder and exports persist, whatever a command does to its shell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.environments.contract import Environment
from app.errors import EnvironmentFailed
from app.models.shell import StatefulShell


@pytest.fixture
def shell(shared: Environment) -> Iterator[StatefulShell]:
    stateful_shell = shared.shell()
    yield stateful_shell
    stateful_shell.close()


def said(shell: StatefulShell, command: str, timeout_s: float = 20) -> str:
    return shell.run(command, timeout_s=timeout_s).stdout.decode()


def test_the_folder_and_the_exports_live_on(shell: StatefulShell) -> None:
    assert said(shell, "pwd").endswith("/testbed\n")
    shell.run("mkdir -p 'a b/c'; cd 'a b'; cd c; export GREETING='it'\\''s\n two lines'", timeout_s=20)
    assert said(shell, 'pwd; echo "$GREETING"').endswith("/testbed/a b/c\nit's\n two lines\n")
    assert said(shell, "sh -c 'cd /; unset GREETING'; cd ..; echo \"$GREETING\"; pwd").endswith("/testbed/a b\n")


def test_a_shell_begins_where_and_with_what_it_is_told(shared: Environment) -> None:
    shared.put("/begins/here/x", b"")
    shell = shared.shell(cwd="/begins/here", env={"ADDED": "by the call"})
    assert said(shell, 'pwd; echo "$ADDED, $GIVEN"').endswith("/begins/here\nby the call, by the task\n")
    shell.close()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("exec sh -c 'exit 7'", 7),
        ("set -e; false; echo not reached", 1),
        ("kill -9 $$", 137),
        ("kill -15 $$", 143),
        ("set -u; : $no_such_variable", 2),
        ("echo 'never closed", 2),
    ],
)
def test_a_command_that_ends_the_shell_leaves_a_usable_one(shell: StatefulShell, command: str, code: int) -> None:
    shell.run("mkdir -p kept; cd kept; export KEPT=yes", timeout_s=20)
    result = shell.run(command, timeout_s=20)
    assert (result.exit_code, result.timed_out, b"not reached" in result.stdout) == (code, False, False)
    assert said(shell, "echo $KEPT; pwd").endswith("/testbed/kept\n")
    assert shell.run("false; true", timeout_s=20).exit_code == 0


def test_a_failing_command_does_not_end_the_shell(shell: StatefulShell) -> None:
    assert [shell.run(f"(exit {code})", timeout_s=20).exit_code for code in (1, 0, 255, 42)] == [1, 0, 255, 42]
    assert shell.run("no-such-command", timeout_s=20).exit_code == 127


def test_both_streams_come_apart_whole_and_without_a_last_newline(shell: StatefulShell) -> None:
    result = shell.run(r"printf 'no newline \377\000'; printf 'nor here\376' >&2", timeout_s=20)
    assert (result.stdout, result.stderr) == (b"no newline \xff\x00", b"nor here\xfe")
    assert shell.run(":", timeout_s=20).stdout == b""


def test_input_is_empty(shell: StatefulShell) -> None:
    assert said(shell, "cat; read line; echo ended") == "ended\n"


def test_a_background_process_lives_on_and_can_be_found(shell: StatefulShell) -> None:
    begun = time.monotonic()
    pid = said(shell, "sleep 40 > /dev/null 2>&1 & echo $!").strip()
    assert time.monotonic() - begun < 20
    assert shell.run(f"kill -0 {pid}", timeout_s=20).ok
    shell.run(f"kill {pid}", timeout_s=20)


def test_a_timeout_kills_what_ran_and_keeps_what_was(shell: StatefulShell) -> None:
    shell.run("mkdir -p later; cd later; export STILL=here", timeout_s=20)
    begun = time.monotonic()
    result = shell.run("echo before; trap '' TERM INT HUP; sh -c 'trap \"\" TERM; sleep 61.5'", timeout_s=0.7)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"before\n")
    assert time.monotonic() - begun < 20
    assert said(shell, "echo $STILL; pwd").startswith("here\n")
    assert "61.5" not in said(shell, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -v grep")


def test_several_shells_at_once_do_not_see_each_other(shared: Environment) -> None:
    def use(number: int) -> str:
        shell = shared.shell()
        shell.run(f"mkdir -p many/{number}; cd many/{number}; export N={number}", timeout_s=30)
        output = said(shell, 'echo "$N $(basename "$(pwd)")"', timeout_s=30)
        shell.close()
        return output

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(use, range(8))) == [f"{n} {n}\n" for n in range(8)]


def test_a_closed_shell_runs_nothing(shared: Environment) -> None:
    shell = shared.shell()
    shell.close()
    shell.close()
    with pytest.raises(EnvironmentFailed, match="closed"):
        shell.run("true", timeout_s=5)
