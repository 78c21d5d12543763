"""The engine that everybody is measured in front of: chat completions as fast as one process can, or as slow as wished.

    python -m bench.gateway.engine        (prints its port; ends when its input does)

A request says itself how it wants to be answered (`wire.Wish`); bytes are made beforehand. Every answer carries the
times at which its request came and it went, so that what a call took beyond the engine is known for each call.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import cast

import uvloop

from bench.gateway import wire
from bench.gateway.processes import to_last_core
from bench.gateway.wire import Wish

_HEAD, _TAIL = wire.answer()
_FIRST_HEAD, _FIRST_TAIL = wire.first_event()
_STAMP_LENGTH = len(wire.stamp(0, 0))
_ANSWER_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % (len(_HEAD) + _STAMP_LENGTH + len(_TAIL))
) + _HEAD
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


_NEXT = tuple(map(_chunk, wire.next_events()))


class Engine:
    """What connections share: the streams that are being held."""

    def __init__(self) -> None:
        self.held: list[Connection] = []

    def release(self) -> int:
        """Let all held streams end; how many there were."""
        held, self.held = self.held, []
        for connection in held:
            connection.finish()
        return len(held)


class Connection(asyncio.Protocol):
    """One caller, with one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._arrived_ns = 0
        self._usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._engine.held:
            self._engine.held.remove(self)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0:
            return
        end = at + 4 + content_length(self._buffer[: at + 2])
        if len(self._buffer) < end:
            return
        request, self._buffer = self._buffer[:end], self._buffer[end:]
        self._arrived_ns = time.monotonic_ns()
        self._take(request)

    def _take(self, request: bytes) -> None:
        path = request[: request.find(b"\r\n")].split(b" ")[1]
        if path.endswith(b"/chat/completions"):
            self._complete(request)
        elif path == b"/release":
            self._plain(b'{"released": %d}' % self._engine.release())
        elif path.endswith(b"/models"):
            self._plain(b'{"object": "list", "data": [{"id": "bench", "object": "model", "owned_by": "bench"}]}')
        else:
            self._plain(b'{"status": "ok"}')

    def _complete(self, request: bytes) -> None:
        wish = wire.wish_in(request)
        self._usage = b'"include_usage"' in request
        send = self._stream if wish.events else self._answer
        if wish.wait_ms:
            # Not always the same: callers that a single pause has brought together would stay together for ever.
            self._loop.call_later(wish.wait_ms / 1000 * random.uniform(0.5, 1.5), send, wish)
        else:
            send(wish)

    def _plain(self, content: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
        self._transport.write(head + content)

    def _answer(self, wish: Wish) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_ANSWER_HEAD + wire.stamp(self._arrived_ns, time.monotonic_ns()) + _TAIL)

    def _stream(self, wish: Wish) -> None:
        if self._transport.is_closing():
            return
        stamped = _FIRST_HEAD + wire.stamp(self._arrived_ns, time.monotonic_ns()) + _FIRST_TAIL
        self._transport.write(_STREAM_HEAD + _chunk(stamped))
        left = wish.events - 1
        if wish.hold:
            self._engine.held.append(self)
        elif wish.every_ms:
            self._loop.call_later(wish.every_ms / 1000, self._go_on, left, wish.every_ms / 1000)
        else:
            self._transport.write(b"".join(_NEXT[number % len(_NEXT)] for number in range(left)))
            self.finish()

    def _go_on(self, left: int, every_s: float) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(_NEXT[left % len(_NEXT)])
            self._loop.call_later(every_s, self._go_on, left - 1, every_s)
        else:
            self.finish()

    def finish(self) -> None:
        """The end of a stream."""
        if not self._transport.is_closing():
            self._transport.write(_chunk(wire.last_events(usage=self._usage)) + b"0\r\n\r\n")


def content_length(head: bytes) -> int:
    """Bytes of the body that these header lines announce. Raises: ValueError: it comes in chunks, of unknown length."""
    lowered = head.lower()
    at = lowered.find(b"\r\ncontent-length:")
    if at < 0:
        if b"\r\ntransfer-encoding:" in lowered:
            raise ValueError("expected a request with a length; found one in chunks")
        return 0
    return int(head[at + 17 : head.index(b"\r\n", at + 2)])


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    engine = Engine()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    over = asyncio.Event()

    def heard() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            over.set()

    loop.add_reader(sys.stdin.fileno(), heard)
    await over.wait()


if __name__ == "__main__":
    to_last_core()
    uvloop.run(_serve())
