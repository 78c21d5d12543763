"""Carries bytes between two connections, both directions at once, until both have ended.

Each direction ends separately (a client may end its request and continue to read) and holds little memory, however
slowly it is read. A connection that is shut from both sides discards what would not be read.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from app.environments.networks.egress import Traffic

BUFFER_BYTES = 256 << 10
"""Maximum bytes read ahead of a slow reader, in each direction."""
_CHUNK_BYTES = 64 << 10
_LAST_S = 5.0
"""Seconds for remaining data once one side has closed."""


@dataclass
class _Direction:
    source: socket.socket
    sink: socket.socket
    count: Callable[[int], None]
    waiting: bytearray = field(default_factory=bytearray)
    read_all: bool = False
    ended: bool = False

    @property
    def reads(self) -> bool:
        return not self.read_all and len(self.waiting) < BUFFER_BYTES

    @property
    def writes(self) -> bool:
        return bool(self.waiting) and not self.ended

    def move(self, events: Mapping[int, int]) -> bool:
        """Reads and writes what it can; whether anything moved. Raises: OSError: the other side reads no more."""
        before = self.read_all, self.ended
        read = self.reads and bool(events.get(self.source.fileno())) and self._read()
        wrote = self.writes and self._write()
        if self.read_all and not self.waiting and not self.ended:
            self.ended = True
            with suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)
        return read or wrote or before != (self.read_all, self.ended)

    def _read(self) -> bool:
        try:
            data = self.source.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.read_all = not data
        self.waiting += data
        return True

    def _write(self) -> bool:
        try:
            sent = self.sink.send(self.waiting)
        except BlockingIOError:
            return False
        self.count(sent)
        del self.waiting[:sent]
        return True


def pump(
    inside: socket.socket,
    outside: socket.socket,
    traffic: Traffic,
    name: str,
    *,
    idle_s: float,
) -> None:
    """Carries bytes until both directions have ended, one side has closed, or nothing passed for `idle_s`.

    name: of the host, for the counts. Both sockets are left open, and non-blocking.
    Raises: OSError: a connection broke.
    """
    inside.setblocking(False)
    outside.setblocking(False)
    directions = [
        _Direction(inside, outside, lambda count: traffic.passed(name, sent_bytes=count)),
        _Direction(outside, inside, lambda count: traffic.passed(name, received_bytes=count)),
    ]
    closed: set[int] = set()
    timeout_s, moved = idle_s, time.monotonic()
    while not all(direction.ended for direction in directions):
        events = _poll(directions, closed, moved + timeout_s - time.monotonic())
        if not events and time.monotonic() >= moved + timeout_s:
            return
        for direction in directions:
            if events.get(direction.sink.fileno(), 0) & (select.POLLHUP | select.POLLERR):
                closed.add(direction.sink.fileno())
                direction.ended, timeout_s = True, min(timeout_s, _LAST_S)
        moves = [direction.move(events) for direction in directions]
        if any(moves):
            moved = time.monotonic()


def _poll(directions: list[_Direction], gone: set[int], timeout_s: float) -> dict[int, int]:
    """Returns what can be done now. Polls a closed socket only for unread data: its end would be reported forever."""
    interest = {direction.source.fileno(): select.POLLIN if direction.reads else 0 for direction in directions}
    for direction in directions:
        if direction.writes:
            interest[direction.sink.fileno()] |= select.POLLOUT
    poll = select.poll()
    for number, events in interest.items():
        if events or number not in gone:
            poll.register(number, events)
    return dict(poll.poll(max(0.0, timeout_s) * 1000))
