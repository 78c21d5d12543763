"""Carries bytes between two connections, each direction in a thread of its own, until both have ended.

Each direction ends separately (a client may end its request and continue to read) and holds one piece, however slowly
it is read.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress

_CHUNK_BYTES = 64 << 10
_LAST_S = 5.0
"""Seconds for remaining data once one side has closed."""


def pump(inside: socket.socket, outside: socket.socket, *, idle_s: float) -> None:
    """Carries bytes until both directions have ended, one side has closed, or nothing passed for `idle_s`.

    Both sockets are left shut. Raises: OSError: a connection broke.
    """
    inside.settimeout(idle_s)  # one that does not read is as idle as one that does not write
    outside.settimeout(idle_s)
    clock = _IdleClock(idle_s)

    def outwards() -> None:
        try:
            _carry(inside, outside, clock)
        except OSError:  # the server reads no more: what it has answered is still carried
            _shut(inside, socket.SHUT_RD)

    thread = threading.Thread(target=outwards, name="egress-outwards", daemon=True)
    thread.start()
    try:
        ended = _carry(outside, inside, clock)
        thread.join(None if ended else _LAST_S)
    finally:
        for one in (inside, outside):
            _shut(one, socket.SHUT_RDWR)
        thread.join()


class _IdleClock:
    """Tells for how long nothing has passed in either direction."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._moved = time.monotonic()

    def moved(self) -> None:
        self._moved = time.monotonic()

    @property
    def left_s(self) -> float:
        return max(0.0, self._moved + self._idle_s - time.monotonic())


def _carry(source: socket.socket, sink: socket.socket, clock: _IdleClock) -> bool:
    """Carries one direction. False: nothing passed for too long, or the sink has closed. Raises: OSError."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(sink, 0)  # reports only that it has closed
    while True:
        ready = dict(poll.poll(clock.left_s * 1000))
        if sink.fileno() in ready or not (ready or clock.left_s):
            return False
        if not ready:
            continue
        data = source.recv(_CHUNK_BYTES)
        if not data:
            _shut(sink, socket.SHUT_WR)
            return True
        sink.sendall(data)
        clock.moved()


def _shut(connection: socket.socket, how: int) -> None:
    with suppress(OSError):
        connection.shutdown(how)
