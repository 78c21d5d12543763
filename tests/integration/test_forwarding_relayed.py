"""Ports inside where the network cannot be entered: a program inside, connections over its input and output."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from app.environments.contract import Environment, Forward
from app.environments.networks.forwarding import forward
from app.environments.networks.forwarding.relayed import RelayedForward
from app.environments.runtimes.oci import OciProvider
from app.host.cgroups import Cgroup
from app.models.shell import InteractiveProgram
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.docker_fixture import tags_of
from tests.integration.network_fixture import (
    LONGEST_WAIT_S,
    connect_inside,
    eventually,
    everything,
    forward_threads,
    nothing_left,
)


class Inside:
    """An environment whose network we could enter, and do so only to be a client there."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def forward(self, serve: Callable[[socket.socket], None], port: int = 0, **more: int) -> Forward:
        return forward(None, self.environment.stream, port, serve, **more)

    def connect(self, port: int) -> socket.socket:
        # A process that is on its way in is in the group before it is in the network.
        inside = [pid for pid in Cgroup(self.environment.id).processes() if not _has_this_network(pid)]
        return connect_inside(inside[0], port)


def _has_this_network(pid: int) -> bool:
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat("/proc/self/ns/net"))
    except OSError:  # it has ended
        return True


@pytest.fixture
def inside(oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings) -> Iterator[Inside]:
    environment = oci.create(tiny, tags_of(oci_settings.installation), timeout_s=30)
    environment.run("true", timeout_s=10)
    yield Inside(environment)
    environment.destroy()
    eventually(lambda: forward_threads() == [])


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def test_connections_come_over_the_programs_input_and_output(inside: Inside) -> None:
    with nothing_left():
        found = inside.forward(echo, 8411)
        assert found.port == 8411
        for _ in range(3):
            with inside.connect(8411) as connection:
                connection.sendall(b"hello")
                assert connection.recv(100) == b"hello"
        assert inside.environment.run("ls -A /tmp", timeout_s=10).stdout == b""
        found.close()
        with pytest.raises(ConnectionRefusedError):
            eventually(lambda: inside.connect(8411).close() is not None)


def test_much_goes_both_ways_at_once_on_several_connections(inside: Inside) -> None:
    found = inside.forward(echo)
    sent = b"0123456789abcdef" * (1 << 16)

    def talk(_: int) -> bytes:
        with inside.connect(found.port) as connection:
            sender = threading.Thread(target=lambda: (connection.sendall(sent), connection.shutdown(socket.SHUT_WR)))
            sender.start()
            said = everything(connection)
            sender.join()
            return said

    with ThreadPoolExecutor(4) as talkers:
        assert [said == sent for said in talkers.map(talk, range(4))] == [True] * 4
    found.close()


def test_a_slow_reader_stops_its_own_connection_and_no_other(inside: Inside) -> None:
    written: list[int] = []

    def endless(connection: socket.socket) -> None:
        if connection.recv(1) == b"e":
            while True:
                written.append(connection.send(b"x" * (1 << 16)))
        connection.sendall(b"quick")

    found = inside.forward(endless)
    with inside.connect(found.port) as slow:
        slow.sendall(b"e")
        last = -1
        while (now := sum(written)) != last or not now:
            assert now < 32 << 20
            last = now
            time.sleep(0.3)
        with inside.connect(found.port) as quick:
            quick.sendall(b"q")
            assert everything(quick) == b"quick"
        found.close()


def test_a_program_that_is_killed_inside_ends_the_port(inside: Inside) -> None:
    inside.forward(echo, 8411)
    with inside.connect(8411) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        inside.environment.run("kill -9 -1", timeout_s=10)
        eventually(lambda: forward_threads() == [])
    found = inside.forward(echo, 8411)
    found.close()


class _Hostile:
    """A program inside that says what it likes."""

    def __init__(self, *words: bytes) -> None:
        self._words = list(words)
        self.closed = threading.Event()

    def read(self, timeout_s: float | None = None) -> bytes | None:
        if self._words:
            return self._words.pop(0)
        self.closed.wait(LONGEST_WAIT_S)
        return b""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None:
        self.closed.set()


READY = struct.pack("<cxHIH", b"R", 0, 2, 8411)


@pytest.mark.parametrize(
    "words",
    [
        [struct.pack("<cxHI", b"O", 64, 0)],
        [struct.pack("<cxHI", b"D", 0, 1 << 31)],
        [struct.pack("<cxHI", b"D", 0, 1) + b"x"],
        [struct.pack("<cxHI", b"O", 0, 0), struct.pack("<cxHI", b"?", 0, 0)],
        [struct.pack("<cxHI", b"O", 0, 0), *[struct.pack("<cxHI", b"D", 0, 1 << 15) + b"x" * (1 << 15)] * 80],
    ],
)
def test_a_relay_that_lies_is_ended(words: list[bytes]) -> None:
    hostile = _Hostile(READY, *words)
    found = RelayedForward(
        cast(InteractiveProgram, hostile), lambda connection: hostile.closed.wait(LONGEST_WAIT_S) and None
    )
    assert hostile.closed.wait(LONGEST_WAIT_S)
    found.close()
    eventually(lambda: forward_threads() == [])


def test_more_than_may_be_served_wait_inside_and_numbers_are_used_again(inside: Inside) -> None:
    active: list[int] = []
    most: list[int] = []

    def short(connection: socket.socket) -> None:
        active.append(1)
        most.append(len(active))
        time.sleep(0.01)
        active.pop()
        connection.sendall(b"served")

    found = inside.forward(short, connections=3)
    connections = [inside.connect(found.port) for _ in range(40)]
    assert [everything(connection) for connection in connections] == [b"served"] * 40
    assert max(most) <= 3
    for connection in connections:
        connection.close()
    found.close()
