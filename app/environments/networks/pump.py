"""Bytes between two connections, both ways at once, until both ways have ended.

Each way ends for itself (a client may end its request and go on to read), holds little memory however slowly it is
read, and a connection that is shut from both sides ends what nobody would read.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

BUFFER_BYTES = 256 << 10
"""Read ahead of a slow reader, each way."""
_CHUNK_BYTES = 64 << 10
_LAST_S = 5.0
"""For what is still under way once one side has gone."""


@dataclass
class _Way:
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
        """Read and write what can be; whether anything was. Raises: OSError: nobody reads."""
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
    *,
    idle_s: float,
    sent: Callable[[int], None],
    received: Callable[[int], None],
) -> None:
    """Carry bytes until both ways have ended, one side is gone, or nothing passed for `idle_s`.

    sent, received: told how many bytes went out and in. Both sockets are left open, and not blocking.
    Raises: OSError: a connection broke.
    """
    inside.setblocking(False)
    outside.setblocking(False)
    ways = [_Way(inside, outside, sent), _Way(outside, inside, received)]
    gone: set[int] = set()
    patience_s, moved = idle_s, time.monotonic()
    while not all(way.ended for way in ways):
        events = _look(ways, gone, moved + patience_s - time.monotonic())
        if not events and time.monotonic() >= moved + patience_s:
            return
        for way in ways:
            if events.get(way.sink.fileno(), 0) & (select.POLLHUP | select.POLLERR):
                gone.add(way.sink.fileno())
                way.ended, patience_s = True, min(patience_s, _LAST_S)
        moves = [way.move(events) for way in ways]
        if any(moves):
            moved = time.monotonic()


def _look(ways: list[_Way], gone: set[int], timeout_s: float) -> dict[int, int]:
    """What can be done now. Of a socket that is gone, only what is left to read: its going would be told for ever."""
    wanted = {way.source.fileno(): select.POLLIN if way.reads else 0 for way in ways}
    for way in ways:
        if way.writes:
            wanted[way.sink.fileno()] |= select.POLLOUT
    poll = select.poll()
    for number, events in wanted.items():
        if events or number not in gone:
            poll.register(number, events)
    return dict(poll.poll(max(0.0, timeout_s) * 1000))
