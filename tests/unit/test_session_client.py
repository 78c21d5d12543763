"""The session's client against helpers that lie: replies come from inside an environment that nobody trusts."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from app.environments.session.client import SessionClient
from app.environments.session.connection import ConnectionLost, HelperConnection, unix_connector
from app.environments.session.protocol import FrameKind
from app.errors import EnvironmentFailed
from app.workers.command_logs import CommandLogs

HELLO = struct.pack("<BBHIII", 2, FrameKind.HELLO, 0, 8, 0x4853464D, 1)
RESULT = struct.Struct("<6I6Q")
Pair = tuple[HelperConnection, socket.socket]


def frame(kind: int, payload: bytes = b"", *, version: int = 2, size: int | None = None) -> bytes:
    return struct.pack("<BBHI", version, kind, 0, len(payload) if size is None else size) + payload


def result(code: int = 0, out: bytes = b"", *, out_size: int | None = None, total: int | None = None) -> bytes:
    size = len(out) if out_size is None else out_size
    fixed = RESULT.pack(code, 0, 0, 0, size, 0, size if total is None else total, 0, 0, 0, 0, 0)
    return frame(FrameKind.RESULT, fixed + out)


class Liar:
    """Says `greeting` to whoever comes, and `answer` to whatever it hears first; later comers are turned away."""

    def __init__(self, greeting: bytes, answer: bytes) -> None:
        self._greeting, self._answer = greeting, answer
        self._ends: list[socket.socket] = []

    def connect(self) -> socket.socket:
        if self._ends:
            raise ConnectionRefusedError("once only")
        ours, theirs = socket.socketpair()
        self._ends.append(theirs)
        theirs.sendall(self._greeting)
        threading.Thread(target=self._speak, args=(theirs,), daemon=True).start()
        return ours

    def _speak(self, end: socket.socket) -> None:
        with end, suppress(OSError):  # the client may hang up before it has heard all
            if end.recv(1 << 20):
                end.sendall(self._answer)


@pytest.fixture
def against() -> Iterator[Callable[..., SessionClient]]:
    clients: list[SessionClient] = []

    def make(answer: bytes, greeting: bytes = HELLO) -> SessionClient:
        clients.append(SessionClient(Liar(greeting, answer).connect, label="liar"))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(FrameKind.RESULT, b"", size=0xFFFFFFFF),
        frame(FrameKind.RESULT, b"", size=64 << 20),
        frame(FrameKind.RESULT, b"short"),
        frame(FrameKind.RESULT, b"x" * 72, version=1),
        frame(FrameKind.OUT, b"x") + result(),
        frame(FrameKind.ERR, b"x") + result(),
        frame(99),
        frame(FrameKind.OK),
        frame(FrameKind.DATA, b"x"),
        result(out=b"x", out_size=2),
        result(out=b"xx", total=1),
        result()[:-1],
    ],
)
def test_an_answer_that_is_none_is_a_failure_of_the_environment(
    against: Callable[..., SessionClient], answer: bytes
) -> None:
    with pytest.raises(EnvironmentFailed, match="liar"):
        against(answer).run("x", timeout_s=5)


def test_more_of_a_long_stream_than_was_asked_for_is_refused(
    against: Callable[..., SessionClient], tmp_path: Path
) -> None:
    liar = against(frame(FrameKind.OUT, b"x" * 60) + frame(FrameKind.OUT, b"x" * 60) + result())
    liar.logs = CommandLogs(tmp_path, 100)
    with pytest.raises(EnvironmentFailed, match="at most 100 bytes of OUT, found 120"):
        liar.run("x", timeout_s=5)
    assert (tmp_path / "0001.stdout").stat().st_size == 60


class Forgiving(Liar):
    """Lets everybody in."""

    def connect(self) -> socket.socket:
        self._ends.clear()
        return super().connect()


def test_only_a_connection_that_ended_means_killed_from_inside() -> None:
    client = SessionClient(Forgiving(HELLO, b"").connect, label="killed")
    assert client.run("x", timeout_s=5).exit_code == 137
    client.close()
    for nonsense in (
        frame(FrameKind.OK),
        frame(99),
        frame(FrameKind.RESULT, b"short"),
        result(out=b"x", out_size=2) + b"more",
    ):
        client = SessionClient(Forgiving(HELLO, nonsense).connect, label="liar")
        with pytest.raises(EnvironmentFailed, match="liar is gone"):
            client.run("x", timeout_s=5)
        client.close()


@pytest.mark.parametrize(
    "greeting", [b"", frame(FrameKind.OK), frame(FrameKind.HELLO, b"who?"), frame(FrameKind.HELLO, b"x" * 65)]
)
def test_who_does_not_greet_as_a_helper_is_not_spoken_to(
    against: Callable[..., SessionClient], greeting: bytes
) -> None:
    client = against(result(), greeting or frame(FrameKind.END))
    with pytest.raises(EnvironmentFailed):
        client.run("x", timeout_s=5)


@pytest.mark.parametrize(
    "answer",
    [
        frame(FrameKind.DATA),
        frame(FrameKind.DATA, b"x" * ((256 << 10) + 1)),
        frame(FrameKind.FAILED, b"x"),
        frame(FrameKind.OK),
    ],
)
def test_a_file_that_is_none_is_a_failure(against: Callable[..., SessionClient], answer: bytes) -> None:
    with pytest.raises(EnvironmentFailed):
        against(answer).get("/x")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection, and the other end of it."""
    ours, theirs = socket.socketpair()
    connection = HelperConnection(ours)
    connection.deadline = time.monotonic() + 60
    yield connection, theirs
    connection.close()
    theirs.close()


def test_a_promised_length_takes_no_memory_before_it_comes(pair: Pair) -> None:
    connection, theirs = pair
    connection.deadline = time.monotonic() + 0.2
    theirs.sendall(frame(FrameKind.RESULT, b"x", size=1 << 30))
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionLost) as silent:
            connection.receive(1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert not silent.value.ended


def test_one_who_drips_is_given_up_in_time(pair: Pair) -> None:
    connection, theirs = pair
    stop = threading.Event()

    def drip() -> None:
        theirs.sendall(frame(FrameKind.RESULT, b"", size=1000))
        while not stop.wait(0.02):
            theirs.send(b"x")

    with ThreadPoolExecutor(1) as threads:
        dripping = threads.submit(drip)
        begun = time.monotonic()
        connection.deadline = begun + 0.3
        with pytest.raises(ConnectionLost):
            connection.receive(1000)
        assert time.monotonic() - begun < 20
        stop.set()
        dripping.result()


def test_frames_that_come_in_pieces_or_together_are_the_same(pair: Pair) -> None:
    connection, theirs = pair
    contents = [os.urandom(n) for n in (0, 1, 200_000, 5, 262_144, 262_144, 7)]
    stream = b"".join(frame(FrameKind.DATA, content) for content in contents)

    def send() -> None:
        for at in range(0, len(stream), 9973):
            theirs.sendall(stream[at : at + 9973])

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        assert [bytes(connection.receive(1 << 20)[1]) for _ in contents] == contents
        sending.result()


def test_one_who_takes_slowly_gets_it_whole_and_one_who_takes_nothing_is_given_up(pair: Pair) -> None:
    connection, theirs = pair
    content = os.urandom(4 << 20)  # more than a socket holds

    def take() -> bytes:
        found = bytearray()
        while len(found) < len(content):
            found += theirs.recv(100_000)
            time.sleep(0.0005)
        return bytes(found)

    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(take)
        connection.send(content)
        assert taking.result() == content
    connection.deadline = time.monotonic() + 0.2
    with pytest.raises(ConnectionLost, match="takes nothing any more") as silent:
        connection.send(content)
    assert not silent.value.ended
    theirs.close()
    with pytest.raises(ConnectionLost) as ended:
        connection.send(content)
    assert ended.value.ended


def test_a_link_in_the_sockets_place_is_not_followed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        (tmp_path / "s").symlink_to("other")
        with pytest.raises(OSError, match="expected the helper's socket"):
            unix_connector(tmp_path / "s")()
        unix_connector(tmp_path / "other")().close()


def test_more_than_was_asked_for_is_refused_before_it_comes(pair: Pair) -> None:
    connection, theirs = pair
    theirs.sendall(frame(FrameKind.RESULT, b"", size=1001))
    with pytest.raises(ConnectionLost, match="at most 1000 bytes"):
        connection.receive(1000)
