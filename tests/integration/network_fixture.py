"""What tests of networks stand on: processes with a network of their own, connections from inside, counts of ours."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest

from app.environments.contract import Forward, Serve
from app.environments.networks.forwarding import forward, namespace
from app.models.shell import InteractiveProgram
from tests.services import missing
from tests.waiting import eventually

LONGEST_WAIT_S = 30.0
_KINDS = ("socket:", "net:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]", "anon_inode:[pidfd]")


class Place:
    """A process in a network of its own with nothing but a loopback, which is down."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 120"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.ready = self._process.stdout.readline() == b"ready\n"
        self.pid = self._process.pid

    def connect(self, port: int, host: str = "127.0.0.1") -> socket.socket:
        """A connection that begins inside."""
        return connect_inside(self.pid, port, host)

    def forward(self, port: int, serve: Serve, **more: Any) -> Forward:
        """A port inside that leads to `serve`."""
        return forward(self.pid, no_stream, port, serve, **more)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def connect_inside(pid: int, port: int, host: str = "127.0.0.1") -> socket.socket:
    process = namespace.pin(pid, lambda: True)
    try:
        return namespace.inside(process, lambda: socket.create_connection((host, port), timeout=LONGEST_WAIT_S))
    finally:
        process.close()


@contextmanager
def places(count: int) -> Iterator[list[Place]]:
    made = [Place() for _ in range(count)]
    try:
        if not all(place.ready for place in made):
            missing("network namespaces: needs root")
        yield made
    finally:
        for place in made:
            place.end()


@pytest.fixture
def place() -> Iterator[Place]:
    with places(1) as made:
        yield made[0]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Threads of forwards and descriptors of this process are as many afterwards as before."""
    _others.update(thread for thread in threading.enumerate() if thread.name.startswith("forward-"))
    before = open_files()
    yield
    eventually(lambda: forward_threads() == [])
    eventually(lambda: open_files() <= before)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """For modules that import it: around every test."""
    with nothing_left():
        yield


def no_stream(argv: object) -> InteractiveProgram:
    raise AssertionError("nothing is started inside")


_others: WeakSet[threading.Thread] = WeakSet()
"""Of tests that ran in this process before: theirs to answer for."""


def forward_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("forward-") and thread not in _others
    ]


def open_files() -> int:
    """Descriptors of the kinds that forwards have."""
    return len([kind for kind in map(_kind, os.listdir("/proc/self/fd")) if kind.startswith(_KINDS)])


def _kind(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # the one of the listing itself
        return ""


def everything(connection: socket.socket) -> bytes:
    """What comes until the end."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
