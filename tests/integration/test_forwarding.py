"""Ports inside that lead to us: on real network namespaces."""

from __future__ import annotations

import socket
import subprocess
import threading

import pytest

from app.environments.networks.forwarding import forward, forward_here, namespace
from app.errors import EnvironmentFailed
from app.models.shell import InteractiveProgram
from tests.integration.network_fixture import (
    LONGEST_WAIT_S,
    Place,
    everything,
    forward_threads,
    leaves_nothing,
    no_stream,
    open_files,
    place,
    places,
)
from tests.waiting import eventually

__all__ = ["leaves_nothing", "place"]


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def test_a_connection_inside_comes_to_us_and_the_port_is_nowhere_else(place: Place) -> None:
    found = place.forward(0, echo)
    with place.connect(found.port) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", found.port), timeout=1)
    found.close()
    with pytest.raises(ConnectionRefusedError):
        place.connect(found.port)


def test_a_wanted_port_is_had_again_after_it_was_closed_with_connections(place: Place) -> None:
    for _ in range(3):
        found = place.forward(3128, echo)
        connection = place.connect(3128)
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        found.close()
        assert connection.recv(1) == b""
        connection.close()


def test_a_port_that_something_inside_has_is_not_taken(place: Place) -> None:
    first = place.forward(3128, echo)
    with pytest.raises(EnvironmentFailed, match=r"port 3128 .* in use"):
        place.forward(3128, echo)
    first.close()


def test_no_more_are_served_at_a_time_than_wanted_and_the_others_wait(place: Place) -> None:
    serving = threading.Semaphore(0)
    go_on = threading.Semaphore(0)
    active: list[int] = []
    most: list[int] = []

    def slow(connection: socket.socket) -> None:
        active.append(1)
        most.append(len(active))
        serving.release()
        go_on.acquire()
        active.pop()
        connection.sendall(b"served")

    found = place.forward(0, slow, connections=3)
    connections = [place.connect(found.port) for _ in range(12)]
    for _ in range(3):
        assert serving.acquire(timeout=LONGEST_WAIT_S)
    assert not serving.acquire(timeout=0.1)
    for _ in connections:
        go_on.release()
    assert [everything(connection) for connection in connections] == [b"served"] * 12
    assert max(most) == 3
    found.close()
    for connection in connections:
        connection.close()


def test_the_end_of_the_environment_is_the_end_of_its_ports() -> None:
    with places(1) as (place,):
        before = open_files()
        found = place.forward(0, echo)
        connection = place.connect(found.port)
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        place.end()
        assert connection.recv(1) == b""
        connection.close()
        eventually(lambda: forward_threads() == [])
        eventually(lambda: open_files() <= before)
        found.close()


def test_fifty_environments_have_the_same_port() -> None:
    with places(50) as made:
        forwards = [
            place.forward(3128, lambda connection, number=number: connection.sendall(b"%d" % number))
            for number, place in enumerate(made)
        ]
        connections = [place.connect(3128) for place in made]
        assert [everything(connection) for connection in connections] == [b"%d" % number for number in range(50)]
        eventually(lambda: set(forward_threads()) == {"forward-accept"})
        for connection in connections:
            connection.close()
        for found in forwards:
            found.close()


def test_a_process_with_this_workers_own_network_is_refused() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        with pytest.raises(EnvironmentFailed, match="a network of its own"):
            forward(process.pid, no_stream, 0, echo)
        process.kill()


def test_a_worker_that_may_not_enter_the_network_has_a_program_carry(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(process: object, work: object) -> None:
        raise namespace.NetworkForbidden("not root")

    def stream(argv: object) -> InteractiveProgram:
        raise EnvironmentFailed("a program is started inside")

    monkeypatch.setattr(namespace, "inside", closed)
    with pytest.raises(EnvironmentFailed, match="a program is started inside"):
        forward(place.pid, stream, 0, echo)


def test_without_a_network_of_its_own_it_is_this_hosts_loopback() -> None:
    found = forward_here(0, echo)
    with socket.create_connection(("127.0.0.1", found.port), timeout=LONGEST_WAIT_S) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
    with pytest.raises(EnvironmentFailed, match="in use"):
        forward_here(found.port, echo)
    found.close()
