"""The environments' contract, second half: shells that remember, programs that are talked to, and what goes wrong."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.environments.base import Environment, EnvironmentProvider
from app.errors import EnvironmentFailed
from app.models.shell import Interactive, StatefulShell
from app.models.spec import EnvironmentSpec, Resources
from app.settings import Settings
from tests.contract.conftest import Create
from tests.contract.environment_grounds import Ground, tags_of

MEBI = 1 << 20


@pytest.fixture
def shell(shared: Environment) -> Iterator[StatefulShell]:
    made = shared.shell()
    yield made
    made.close()


def said(shell: StatefulShell, command: str, timeout_s: float = 20) -> str:
    return shell.run(command, timeout_s=timeout_s).stdout.decode()


# --- A shell that remembers -----------------------------------------------------------------------------------------


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


def test_a_long_command_runs(shell: StatefulShell) -> None:
    assert said(shell, f"cd /; # {'x' * 300_000}\necho long") == "long\n"
    assert said(shell, "pwd").endswith("\n")


def test_a_background_process_lives_on_and_can_be_found(shell: StatefulShell) -> None:
    begun = time.monotonic()
    pid = said(shell, "sleep 40 > /dev/null 2>&1 & echo $!").strip()
    assert time.monotonic() - begun < 5
    assert shell.run(f"kill -0 {pid}", timeout_s=20).ok
    shell.run(f"kill {pid}", timeout_s=20)


def test_a_timeout_kills_what_ran_and_keeps_what_was(shell: StatefulShell) -> None:
    shell.run("mkdir -p later; cd later; export STILL=here", timeout_s=20)
    begun = time.monotonic()
    result = shell.run("echo before; trap '' TERM INT HUP; sh -c 'trap \"\" TERM; sleep 61.5'", timeout_s=0.7)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"before\n")
    assert time.monotonic() - begun < 5
    assert said(shell, "echo $STILL; pwd").startswith("here\n")
    assert "61.5" not in said(shell, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -v grep")


def test_several_shells_at_once_do_not_see_each_other(shared: Environment) -> None:
    def use(number: int) -> str:
        shell = shared.shell()
        shell.run(f"mkdir -p many/{number}; cd many/{number}; export N={number}", timeout_s=30)
        found = said(shell, 'echo "$N $(basename "$(pwd)")"', timeout_s=30)
        shell.close()
        return found

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(use, range(8))) == [f"{n} {n}\n" for n in range(8)]


def test_a_closed_shell_runs_nothing(shared: Environment) -> None:
    shell = shared.shell()
    shell.close()
    shell.close()
    with pytest.raises(EnvironmentFailed, match="closed"):
        shell.run("true", timeout_s=5)


# --- A program that is talked to ------------------------------------------------------------------------------------


def until(stream: Interactive, wanted: bytes, timeout_s: float = 15) -> bytes:
    """What the program writes, up to and with `wanted`; or to its end."""
    found, deadline = b"", time.monotonic() + timeout_s
    while wanted not in found and time.monotonic() < deadline:
        piece = stream.read(0.5)
        if piece == b"":
            break
        found += piece or b""
    return found


def rest(stream: Interactive) -> bytes:
    found = b""
    while piece := stream.read(15):
        found += piece
    return found


def test_a_program_answers_and_ends_with_its_input(shared: Environment) -> None:
    stream = shared.stream(["/bin/cat"])
    stream.write(b"one\n")
    assert until(stream, b"\n") == b"one\n"
    assert stream.wait(0.1) is None
    assert stream.read(0.1) is None
    stream.write(b"\xff\x00 two")
    stream.close_input()
    assert rest(stream) == b"\xff\x00 two"
    assert stream.wait(15) == 0
    stream.close()
    stream.close()


def test_a_programs_exit_code_and_both_streams_arrive(shared: Environment) -> None:
    stream = shared.stream(
        ["/bin/sh", "-c", "echo out; echo err >&2; echo $A; pwd; exit 5"], cwd="/tmp", env={"A": "b"}
    )
    assert stream.wait(15) == 5
    assert sorted(rest(stream).splitlines()) == sorted(
        [b"out", b"err", b"b", shared.run("pwd", cwd="/tmp", timeout_s=20).stdout.strip()]
    )
    stream.close()


def test_a_terminal_has_a_size_that_can_change(shared: Environment) -> None:
    script = "stty size; read go; stty size; exit 4"
    stream = shared.stream(["/bin/sh", "-c", script], tty=True, rows=30, columns=100)
    assert b"30 100" in until(stream, b"30 100")
    stream.resize(44, 120)
    stream.write(b"go\n")
    assert b"44 120" in rest(stream)
    assert stream.wait(15) == 4
    stream.close()


def test_a_signal_reaches_the_program(shared: Environment) -> None:
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    stream = shared.stream(["/bin/sh", "-c", script])
    assert until(stream, b"ready\n") == b"ready\n"
    stream.signal(signal.SIGINT)
    assert until(stream, b"caught\n") == b"caught\n"
    assert stream.wait(15) == 9
    stream.close()


def test_closing_kills_what_still_runs(own: Environment) -> None:
    stream = own.stream(["/bin/sh", "-c", "setsid sleep 62.5 & trap '' TERM; echo ready; sleep 63.5"])
    assert until(stream, b"ready\n") == b"ready\n"
    stream.close()
    give_up = time.monotonic() + 10  # a helper that is reached through a bridge hears of it a moment later
    while any(name in (left := _commands(own)) for name in (b"sleep 62.5", b"sleep 63.5")):
        assert time.monotonic() < give_up, left
        time.sleep(0.1)


def _commands(environment: Environment) -> bytes:
    return environment.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '", timeout_s=20).stdout


def test_a_program_that_is_not_there_is_told(shared: Environment) -> None:
    with pytest.raises(EnvironmentFailed, match="no-such-program"):
        shared.stream(["/no-such-program"])


# --- Much, and too much ---------------------------------------------------------------------------------------------


def test_a_million_lines_keep_their_head_and_tail(shared: Environment) -> None:
    result = shared.run("seq 1000000", timeout_s=60)
    assert (result.exit_code, result.truncated) == (0, True)
    assert result.stdout.startswith(b"1\n2\n3\n")
    assert result.stdout.endswith(b"\n999999\n1000000\n")
    assert len(result.stdout) < 2 * MEBI + 100


@pytest.mark.parametrize(
    "size", [pytest.param("200M", id="200MB"), pytest.param("10G", id="10GB", marks=pytest.mark.slow)]
)
def test_a_flood_takes_neither_our_memory_nor_the_session(shared: Environment, size: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = shared.run(f"head -c {size} /dev/zero; echo; echo end", timeout_s=280)
    assert (result.exit_code, result.truncated, len(result.stdout) < 3 * MEBI) == (0, True, True)
    assert result.stdout.endswith(b"\nend\n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert shared.run("echo well", timeout_s=20).stdout == b"well\n"


def test_two_floods_at_once_are_told_apart(shared: Environment) -> None:
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda c: shared.run(f"head -c 9M /dev/zero | tr '\\0' {c}", timeout_s=60), "ab")
    assert (set(one.stdout[:1000]), set(two.stdout[-1000:])) == ({ord("a")}, {ord("b")})


def confined(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings, limits: Resources
) -> Environment:
    wanted = spec.model_copy(update={"resources": limits})
    return provider.create(wanted, tags_of(settings.installation), timeout_s=60)


def test_a_fork_bomb_ends_with_its_time_and_the_neighbour_is_well(
    ground: Ground, provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings, create: Create
) -> None:
    if not ground.isolates:
        pytest.skip("this kind has no limit of processes")
    bombed, neighbour = confined(provider, spec, settings, Resources(pids=40, cpus=0.5)), create()
    try:
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
        bombed.put("/bomb.py", bomb.encode())
        with ThreadPoolExecutor(1) as threads:
            exploding = threads.submit(bombed.run, "python3 /bomb.py", timeout_s=1.5)
            time.sleep(0.7)
            assert neighbour.run("echo well", timeout_s=20).stdout == b"well\n"
            assert exploding.result(timeout=30).timed_out
        assert bombed.run("echo usable", timeout_s=20).stdout == b"usable\n"
        assert bombed.stats().processes < 10
    finally:
        bombed.destroy()
        neighbour.destroy()


def test_who_was_killed_for_memory_is_told_from_who_was_killed(
    ground: Ground, provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings
) -> None:
    if not ground.isolates:
        pytest.skip("this kind has no limit of memory")
    environment = confined(provider, spec, settings, Resources(memory_bytes=48 << 20))
    try:
        greedy = environment.run("exec python3 -c 'x = bytearray(200 << 20)'", timeout_s=60)
        assert (greedy.exit_code, greedy.out_of_memory) == (137, True)
        assert b"memory limit" in greedy.stderr
        killed = environment.run("kill -9 $$", timeout_s=20)
        assert (killed.exit_code, killed.out_of_memory) == (137, False)
        assert environment.run("echo usable", timeout_s=20).stdout == b"usable\n"
    finally:
        environment.destroy()


# --- The end --------------------------------------------------------------------------------------------------------


def test_destroy_ends_shells_and_streams(create: Create) -> None:
    environment = create()
    shell, stream = environment.shell(), environment.stream(["/bin/cat"])
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(shell.run, "sleep 60", timeout_s=90)
        reading = threads.submit(stream.read, 30)
        time.sleep(0.4)
        begun = time.monotonic()
        environment.destroy()
        with pytest.raises(EnvironmentFailed):
            running.result(timeout=5)
        assert reading.exception(timeout=5) is not None or reading.result() == b""
    assert time.monotonic() - begun < 5
    shell.close()
    stream.close()
