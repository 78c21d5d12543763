"""Contract of forwarded ports: connections from inside reach `serve`, and end with their environment."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from app.environments.contract import Environment
from app.errors import EnvironmentFailed
from megaflow.contract.environments.fixture import Fixture
from megaflow.contract.environments.fixtures import Create


def shout(connection: socket.socket) -> None:
    """Reads to the end and answers in capitals."""
    with connection, connection.makefile("rwb") as stream:
        stream.write(stream.read().upper())


def hear(environment: Environment, fixture: Fixture, port: int) -> bytes:
    return environment.run(fixture.talk.format(port=port), timeout_s=30).stdout


@pytest.mark.needs("forwards")
def test_a_connection_to_a_port_inside_comes_to_us(own: Environment, fixture: Fixture) -> None:
    forward = own.forward(0, shout)
    assert 0 < forward.port < 65536
    assert [hear(own, fixture, forward.port) for _ in range(2)] == [b"PING", b"PING"]
    forward.close()


@pytest.mark.needs("forwards")
def test_a_port_is_the_one_that_was_asked_for_and_nobody_elses(own: Environment, fixture: Fixture) -> None:
    free = own.forward(0, shout)
    port = free.port
    with pytest.raises(EnvironmentFailed):
        own.forward(port, shout)
    free.close()
    free.close()
    assert hear(own, fixture, port) == b""
    again = own.forward(port, shout)
    assert (again.port, hear(own, fixture, port)) == (port, b"PING")
    again.close()


@pytest.mark.needs("forwards")
def test_connections_are_served_side_by_side(own: Environment, fixture: Fixture) -> None:
    together = threading.Barrier(3)

    def serve(connection: socket.socket) -> None:
        together.wait(20)  # the barrier breaks, without an answer, unless three are here at once
        shout(connection)

    forward = own.forward(0, serve)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: hear(own, fixture, forward.port), range(3)))
    assert answers == [b"PING"] * 3
    forward.close()


@pytest.mark.needs("forwards")
def test_the_end_of_an_environment_ends_its_connections(create: Create, fixture: Fixture) -> None:
    environment, heard, ended = create(), threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            heard.set()
            while True:
                connection.sendall(b"on and on ")
                time.sleep(0.05)
        ended.set()

    forward = environment.forward(0, serve)
    with ThreadPoolExecutor(1) as threads:
        talking = threads.submit(hear, environment, fixture, forward.port)
        assert heard.wait(20)
        environment.destroy()
        assert ended.wait(10)
        assert talking.exception(timeout=20) is None or isinstance(talking.exception(), EnvironmentFailed)
    forward.close()
    with pytest.raises(EnvironmentFailed):
        environment.forward(0, shout)


def test_where_no_port_leads_to_us_that_is_said(own: Environment, fixture: Fixture) -> None:
    if fixture.forwards:
        pytest.skip(f"the fixture {fixture.name} forwards")
    with pytest.raises(EnvironmentFailed):
        own.forward(0, shout)
