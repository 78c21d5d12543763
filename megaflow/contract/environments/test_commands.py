"""Contract of commands: exit codes, streams, input, output, variables, and timeouts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments.contract import Environment
from app.workers.command_logs import CommandLogs

MEBI = 1 << 20
_own_commands = pytest.mark.needs("own_commands")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("no-such-command", 127),
        ("kill -9 $$", 137),
        ("kill -15 $$", 143),
    ],
)
def test_the_exit_code_is_exact(shared: Environment, command: str, code: int) -> None:
    result = shared.run(command, timeout_s=20)
    assert (result.exit_code, result.timed_out) == (code, False)


def test_the_two_streams_come_apart_and_binary_safe(shared: Environment) -> None:
    result = shared.run(r"printf '\000\377\n\r'; printf 'to\000err\376' >&2", timeout_s=20)
    assert result.stdout == b"\x00\xff\n\r"
    assert result.stderr == b"to\x00err\xfe"
    assert result.text().endswith("err\ufffd")


def test_a_command_reads_its_input_to_the_end(shared: Environment) -> None:
    sent = bytes(range(256)) * 4096
    assert shared.run("cat", stdin=sent, timeout_s=20).stdout == sent


def test_input_that_nobody_reads_hurts_nobody(shared: Environment) -> None:
    assert shared.run("exec 0<&-; echo done", stdin=b"x" * (4 * MEBI), timeout_s=20).stdout == b"done\n"


def test_without_input_a_reader_sees_the_end_at_once(shared: Environment) -> None:
    assert shared.run("cat; echo ended", timeout_s=20).stdout == b"ended\n"


def test_long_output_keeps_its_head_and_its_tail(shared: Environment) -> None:
    result = shared.run("echo first; head -c 8000000 /dev/zero | tr '\\0' x; echo; echo last", timeout_s=60)
    assert result.exit_code == 0
    assert result.truncated
    assert result.stdout.startswith(b"first\nxxx")
    assert result.stdout.endswith(b"xxx\nlast\n")
    assert 2 * MEBI <= len(result.stdout) < 2 * MEBI + 100


def test_all_of_a_long_output_is_kept_outside_and_nothing_of_it_inside(shared: Environment, tmp_path: Path) -> None:
    before = shared.run("ls -a", timeout_s=30).stdout
    if not shared.keep_logs(CommandLogs(tmp_path, 64 * MEBI)):
        pytest.skip("this kind keeps no logs")
    try:
        long = shared.run("head -c 3000000 /dev/zero | tr '\\0' x; echo last; echo short >&2", timeout_s=60)
        assert shared.run("echo short", timeout_s=20).logs == ()
    finally:
        shared.keep_logs(None)
    (log,) = tmp_path.glob("*.stdout")
    assert log.read_bytes() == b"x" * 3_000_000 + b"last\n"
    assert (long.truncated, long.logs) == (True, (log.name,))
    assert f"left out; all of it is {log.name} in".encode() in long.stdout
    assert shared.run("head -c 3000000 /dev/zero", timeout_s=60).logs == ()
    assert shared.run("ls -a", timeout_s=30).stdout == before


def test_two_mebibytes_are_kept_whole(shared: Environment) -> None:
    result = shared.run("head -c 2097152 /dev/zero", timeout_s=60)
    assert (len(result.stdout), result.truncated) == (2 * MEBI, False)


def test_the_working_folder_is_the_tasks_unless_named(shared: Environment) -> None:
    assert shared.run("pwd", timeout_s=20).stdout.endswith(b"/testbed\n")
    shared.put("/elsewhere/x", b"")
    assert shared.run("pwd", cwd="/elsewhere", timeout_s=20).stdout.endswith(b"/elsewhere\n")


def test_a_missing_working_folder_is_an_answer_that_names_it(shared: Environment) -> None:
    result = shared.run("true", cwd="/not/there", timeout_s=20)
    assert result.exit_code == 126
    assert b"/not/there" in result.stderr


def test_variables_come_from_the_task_and_the_call(shared: Environment) -> None:
    result = shared.run('echo "$GIVEN, $ADDED"', env={"ADDED": "by 'the' call\n"}, timeout_s=20)
    assert result.stdout == b"by the task, by 'the' call\n\n"


def test_the_workers_own_variables_stay_outside(shared: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_WORKERS_SECRET", "hush")
    assert b"hush" not in shared.run("env", timeout_s=20).stdout


def test_a_command_longer_than_an_argument_may_be_runs(shared: Environment) -> None:
    assert (
        shared.run(f"# {'x' * 300_000}\nread line; echo got $line", stdin=b"it\n", timeout_s=20).stdout == b"got it\n"
    )


def test_commands_run_side_by_side(shared: Environment) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: shared.run(f"sleep 0.5; echo {n}; exit {n}", timeout_s=30), range(8)))
    assert [(r.exit_code, r.stdout) for r in results] == [(n, f"{n}\n".encode()) for n in range(8)]


@_own_commands
def test_a_background_process_neither_delays_nor_dies(own: Environment) -> None:
    begun = time.monotonic()
    result = own.run(
        "(sleep 3; i=0; while [ $i -lt 30 ]; do echo $i; i=$((i+1)); done; echo x > alive) & exit 5", timeout_s=30
    )
    assert result.exit_code == 5
    assert time.monotonic() - begun < 2.9
    assert own.run("sleep 3.5; cat alive", timeout_s=30).stdout == b"x\n"


def test_a_command_that_closes_its_streams_is_waited_for(shared: Environment) -> None:
    begun = time.monotonic()
    assert shared.run("exec >&- 2>&-; sleep 0.5; exit 4", timeout_s=20).exit_code == 4
    assert time.monotonic() - begun >= 0.5


BEAT = "while :; do date +%s%N > {name}.new; mv {name}.new {name}; sleep 0.05; done"


def beats(environment: Environment, name: str) -> bool:
    """Whether the loop that writes `name` is alive."""
    look = f"cat {name}; sleep 0.6; cat {name}"
    lines = environment.run(look, timeout_s=20).stdout.split()
    return len(lines) == 2 and lines[0] != lines[1]


@_own_commands
@pytest.mark.parametrize(
    "start",
    [
        "sh -c '{loop}'",
        "sh -c '{loop}' & wait",
        "setsid sh -c '{loop}' > /dev/null 2>&1 & sleep 60",
        "trap '' TERM INT HUP; sh -c '{loop}'",
        "setsid sh -c \"setsid sh -c '{loop}' & sleep 60\" & sleep 60",
    ],
)
def test_a_timeout_kills_the_whole_tree(own: Environment, start: str) -> None:
    begun = time.monotonic()
    result = own.run("echo before; " + start.format(loop=BEAT.format(name="beat")), timeout_s=1)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"before\n")
    assert time.monotonic() - begun < 20
    assert not beats(own, "beat")


def test_a_timeout_spares_other_commands_and_servers(own: Environment) -> None:
    own.run(f"setsid sh -c '{BEAT.format(name='server')}' > /dev/null 2>&1 &", timeout_s=20)
    other = ThreadPoolExecutor(1).submit(own.run, "sleep 3; echo whole", timeout_s=30)
    assert own.run("sleep 60", timeout_s=1).timed_out
    assert other.result().stdout == b"whole\n"
    assert beats(own, "server")
