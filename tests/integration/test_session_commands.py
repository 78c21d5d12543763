"""Commands over a real session helper: exit codes, streams, limits, timeouts, background, cancelling."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments.prebuilt import binary
from app.environments.session.client import SessionClient
from app.environments.session.connection import unix_connector
from app.errors import EnvironmentFailed
from app.workers.command_logs import CommandLogs
from tests.integration.session_fixture import Fixture, fixture, may_unshare, over_stdio
from tests.waiting import eventually

MEBI = 1 << 20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return binary(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module", params=["init", "beside"])
def place(request: pytest.FixtureRequest, program: Path) -> Iterator[Fixture]:
    if request.param == "init" and not may_unshare():
        pytest.skip("namespaces may not be made here")
    with fixture(program, as_init=request.param == "init") as made:
        yield made


@pytest.fixture(scope="module")
def session(place: Fixture) -> SessionClient:
    return place.client(env={"GIVEN": "by the session", "OVER": "1"}, cwd="/usr")


@pytest.fixture
def inside(program: Path) -> Iterator[Fixture]:
    """A pid namespace of one's own: for what kills everybody."""
    if not may_unshare():
        pytest.skip("namespaces may not be made here")
    with fixture(program, as_init=True) as made:
        yield made


def tell(client: SessionClient, command: str) -> bytes:
    return client.run(command, timeout_s=20).stdout


def running(client: SessionClient, mark: str) -> bool:
    """Whether a process with `mark` on its command line lives; a pattern that does not find itself."""
    return client.run(["pgrep", "-f", f"[{mark[0]}]{mark[1:]}"], timeout_s=20).ok


def test_a_program_gets_its_arguments_as_they_are(session: SessionClient) -> None:
    result = session.run(["printf", "%s|", "a b", "", "$HOME", "ü", "'\n"], timeout_s=20)
    assert result.stdout == "a b||$HOME|ü|'\n|".encode()


@pytest.fixture
def logged(place: Fixture, tmp_path: Path) -> SessionClient:
    """With 1 MiB of room for long outputs, in `logs`."""
    client = place.client(cwd="/usr")
    client.logs = CommandLogs(tmp_path / "logs", MEBI)
    return client


def counted(until: int) -> bytes:
    return b"".join(b"%d\n" % n for n in range(1, until + 1))


def test_the_room_for_logs_is_bounded_in_all_and_what_was_cut_says_so(logged: SessionClient, tmp_path: Path) -> None:
    first = logged.run("seq 100000", timeout_s=20, limit_bytes=1000)
    assert b"all of it is 0001.stdout" in first.stdout
    second = logged.run("seq 10000000; echo end", timeout_s=60, limit_bytes=1000)
    left = MEBI - len(counted(100000))
    assert f"the first {left} bytes of it are 0002.stdout in the attempt's command_logs: ".encode() in second.stdout
    assert second.stdout.endswith(b"10000000\nend\n")
    third = logged.run("seq 100000", timeout_s=20, limit_bytes=1000)
    assert (third.logs, b"the attempt's command_logs are full" in third.stdout) == ((), True)
    assert sum(file.stat().st_size for file in (tmp_path / "logs").iterdir()) == MEBI


@as_root
def test_another_user_is_found_by_name_and_number(session: SessionClient) -> None:
    command = "id -u; id -g; echo $HOME; echo fine > /dev/stdout"
    assert session.run(command, user="nobody", cwd="/", timeout_s=20).stdout == b"65534\n65534\n/nonexistent\nfine\n"
    assert session.run("id -u; id -g", user="12345:54321", timeout_s=20).stdout == b"12345\n54321\n"
    assert session.run("id -g", user="nobody:daemon", timeout_s=20).stdout == b"1\n"
    result = session.run("true", user="nobody-knows", timeout_s=20)
    assert (result.exit_code, b"nobody-knows" in result.stderr) == (126, True)


@pytest.mark.parametrize(
    "start",
    [
        "trap '' TERM INT HUP; sleep {n}; sleep {n}",
        "setsid sh -c \"setsid env -i sh -c 'sleep {n} & sleep {n}' & sleep 60\" & sleep 60",
        "sleep {n} & kill -STOP $!; exec >&- 2>&-; sleep 60",
    ],
)
def test_a_timeout_kills_the_whole_tree_and_nothing_else(session: SessionClient, start: str) -> None:
    number = f"77{time.monotonic_ns() % 10**9}"
    session.run("sleep 8080 > /dev/null 2>&1 &", timeout_s=20)
    begun = time.monotonic()
    result = session.run("echo before; " + start.format(n=number), timeout_s=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"before\n")
    assert time.monotonic() - begun < 20
    assert not running(session, f"sleep {number}")
    assert running(session, "sleep 8080")
    session.run("pkill -f '[s]leep 8080'", timeout_s=20)


def test_nothing_becomes_a_zombie(inside: Fixture) -> None:
    session = inside.client()
    for _ in range(20):
        session.run("(sleep 0.01 &) ; true", timeout_s=20)
    assert eventually(lambda: b"Z" not in tell(session, "ps -e -o stat="))


def test_kill_all_leaves_only_the_helper(inside: Fixture) -> None:
    session = inside.client()
    session.run("for i in 1 2 3; do setsid sleep 90 > /dev/null 2>&1 & done", timeout_s=20)
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(session.run, "sleep 90", timeout_s=60)
        assert eventually(lambda: session.stats().processes == 5)
        assert session.kill_all() == 5
        assert under_way.result(timeout=20).exit_code == 137
    assert session.stats().processes == 0
    assert session.kill_all() == 0


def test_beside_others_kill_all_takes_only_what_came_from_us(program: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger, fixture(program, as_init=False) as made:
        session = made.client()
        session.run("(setsid sleep 90 > /dev/null 2>&1 &)", timeout_s=20)
        assert session.kill_all() == 1
        assert stranger.poll() is None
        stranger.kill()


def test_without_a_client_the_helper_and_its_environment_end(program: Path) -> None:
    with fixture(program, as_init=False, orphan_exit_s=0.3) as made:
        session = made.client()
        session.run("sleep 5678 > /dev/null 2>&1 &", timeout_s=20)
        time.sleep(0.6)
        assert made.process.poll() is None, "a connection that stays open keeps it"
        session.close()
        assert made.process.wait(5) == 0
    assert subprocess.run(["pgrep", "-f", "[s]leep 5678"], check=False).returncode == 1


def test_when_the_helper_dies_everybody_hears_it(inside: Fixture) -> None:
    session = inside.client()
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(session.run, "sleep 60", timeout_s=90)
        time.sleep(0.2)
        inside.process.kill()
        with pytest.raises(EnvironmentFailed, match="gone"):
            under_way.result(timeout=20)
    with pytest.raises(EnvironmentFailed):
        session.run("true", timeout_s=5)


def test_over_stdin_and_stdout_it_is_the_same(program: Path, tmp_path: Path) -> None:
    with over_stdio([str(program), "--stdio"]) as session:
        assert session.run("echo out; echo err >&2; exit 3", timeout_s=20).exit_code == 3
        session.run(f"(sleep 0.3; echo x > {tmp_path}/alive) > /dev/null 2>&1 &", timeout_s=20)
        assert session.run("sleep 60", timeout_s=0.3).timed_out
        assert tell(session, "echo next") == b"next\n"
    assert eventually((tmp_path / "alive").exists), "what was left in the background outlives the connection"


def test_a_bridge_leads_to_a_helper_that_listens(program: Path, place: Fixture) -> None:
    with over_stdio([str(program), "--bridge", str(place.socket)]) as session:
        sent = os.urandom(MEBI)
        assert session.run("cat", stdin=sent, timeout_s=20).stdout == sent


def test_a_zero_byte_is_refused_before_anything_starts(session: SessionClient) -> None:
    with pytest.raises(ValueError, match="zero"):
        session.run("echo a\0b", timeout_s=20)


def test_what_was_left_in_the_background_may_be_stopped(inside: Fixture) -> None:
    session = inside.client()
    session.run("sleep 96 > /dev/null 2>&1 &", timeout_s=20)
    assert session.run("pkill -STOP -f '[s]leep 96'", timeout_s=20).ok
    time.sleep(0.1)
    assert running(session, "sleep 96")


def test_an_inherited_socket_serves_as_well(program: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(8)
        number = listening.fileno()
        with subprocess.Popen([str(program), "--listen-fd", str(number)], pass_fds=[number]) as process:
            session = SessionClient(unix_connector(tmp_path / "s"))
            session.wait_ready(5)
            assert tell(session, "ls /proc/self/fd") == b"0\n1\n2\n3\n", "nothing of the helper's is handed on"
            session.close()
            process.terminate()
