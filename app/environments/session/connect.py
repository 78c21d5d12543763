"""Ways to a helper: what a lane needs of a connection, and the one over a unix socket."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_PATIENCE_S = 5
"""For a place in the queue of a listener that accepts nobody."""


class Stream(Protocol):
    """What a lane needs of a socket: `socket.socket` and what a driver hijacks from an engine have it.

    `fileno` is polled for input, so an adapter may hold back no bytes that it has already taken from there.
    """

    def sendall(self, data: bytes | memoryview, /) -> None: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def settimeout(self, value: float | None, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...


class Immediate:
    """A socket that is asked before it is waited for: what is ready costs one system call, not four."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)  # else Python waits before each call
        self._connection = connection
        self._timeout_s = math.inf

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Raises: TimeoutError, OSError."""
        left, until = memoryview(data), 0.0
        while left:
            try:
                left = left[self._connection.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                until = until or time.monotonic() + self._timeout_s
                self._wait(select.POLLOUT, until - time.monotonic())

    def recv_into(self, buffer: memoryview, /) -> int:
        """0 at the end. Raises: TimeoutError, OSError."""
        while True:
            try:
                return self._connection.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(select.POLLIN, self._timeout_s)

    def _wait(self, event: int, timeout_s: float) -> None:
        poll = select.poll()
        try:
            poll.register(self._connection, event)
        except ValueError as error:
            raise OSError(errno.EBADF, "the connection was closed") from error
        if not poll.poll(None if timeout_s == math.inf else max(0.0, timeout_s) * 1000):
            raise TimeoutError

    def settimeout(self, value: float | None, /) -> None:
        self._timeout_s = math.inf if value is None else value

    def shutdown(self, how: int, /) -> None:
        self._connection.shutdown(how)

    def close(self) -> None:
        self._connection.close()

    def fileno(self) -> int:
        return self._connection.fileno()


Connect = Callable[[], Stream]
"""Gives a fresh lane each time. Raises OSError when there is none (yet)."""


def unix_connector(path: Path) -> Connect:
    """Connects to the socket at `path`, of any length.

    The folder may be writable from inside, so a link put in the socket's place is not followed: it could lead to any
    socket of this host.
    """

    def connect() -> Stream:
        # Opened as itself, looked at, and connected through the descriptor: nothing can be exchanged in between.
        place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(place).st_mode):
                raise FileNotFoundError(f"expected the helper's socket at {path}, found something else.")
            return _connected(f"/proc/self/fd/{place}")
        finally:
            os.close(place)

    return connect


def _connected(address: str) -> socket.socket:
    """Waits by the kernel's clock: with Python's, a full queue would be refused at once."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _PATIENCE_S, 0))
        connection.connect(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 0))
    except BlockingIOError as error:
        connection.close()
        raise TimeoutError(f"expected the helper to accept a connection in {_PATIENCE_S} s, found it busy.") from error
    except OSError:
        connection.close()
        raise
    return connection
