"""Contract of interactive programs, with pipes or a terminal."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.environments.contract import Environment
from app.errors import EnvironmentFailed
from app.models.shell import InteractiveProgram
from megaflow.contract.environments.fixtures import Create


def until(stream: InteractiveProgram, wanted: bytes, timeout_s: float = 15) -> bytes:
    """Returns the program's output up to and with `wanted`, or to its end."""
    output, deadline = b"", time.monotonic() + timeout_s
    while wanted not in output and time.monotonic() < deadline:
        piece = stream.read(0.5)
        if piece == b"":
            break
        output += piece or b""
    return output


def rest(stream: InteractiveProgram) -> bytes:
    output = b""
    while piece := stream.read(15):
        output += piece
    return output


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


@pytest.mark.needs("has_terminals")
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
    script = "trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.1; done"
    stream = shared.stream(["/bin/sh", "-c", script])
    assert until(stream, b"ready\n") == b"ready\n"
    stream.signal(signal.SIGUSR1)  # background programs ignore SIGINT
    # The whole process group gets the signal: if `sleep` ran already, the shell first prints how that ended.
    assert until(stream, b"caught\n").endswith(b"caught\n")
    assert stream.wait(15) == 9
    stream.close()


def test_closing_kills_what_still_runs(own: Environment) -> None:
    stream = own.stream(["/bin/sh", "-c", "setsid sleep 62.5 & trap '' TERM; echo ready; sleep 63.5"])
    assert until(stream, b"ready\n") == b"ready\n"
    stream.close()
    give_up = time.monotonic() + 30  # a helper behind a bridge gets the request a moment later
    while any(name in (left := _commands(own)) for name in (b"sleep 62.5", b"sleep 63.5")):
        assert time.monotonic() < give_up, left
        time.sleep(0.1)


def _commands(environment: Environment) -> bytes:
    return environment.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '", timeout_s=20).stdout


def test_a_program_that_is_not_there_is_told(shared: Environment) -> None:
    with pytest.raises(EnvironmentFailed, match="no-such-program"):
        shared.stream(["/no-such-program"])


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
            running.result(timeout=30)
        assert reading.exception(timeout=30) is not None or reading.result() == b""
    assert time.monotonic() - begun < 20
    shell.close()
    stream.close()
