"""A caller's end of one HTTP connection, for the load: as little parsing as there can be."""

from __future__ import annotations

import asyncio
import time
from typing import cast


class Caller(asyncio.Protocol):
    """One connection. `call` gives the whole answer; what came first is remembered with its time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._parts: list[bytes] = []
        self._left: int | None = None  # bytes of the body; None: not known yet, or it comes in chunks
        self._chunked = False
        self.head = b""
        self.first_ns = 0
        self.ended_ns = 0
        self.began: asyncio.Future[None] = self._loop.create_future()
        self.done: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        for waiting in (self.began, self.done):
            if not waiting.done():
                waiting.set_exception(ConnectionError("closed before the end of the answer"))
                waiting.exception()  # it is nobody's duty to look

    def send(self, request: bytes) -> None:
        self._reset()
        if self.transport is None:
            raise ConnectionError("closed")
        self.transport.write(request)

    def body(self) -> bytes:
        return b"".join(self._parts)

    @property
    def status(self) -> int:
        return int(self.head[9:12])

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if not self.head and not (data := self._read_head(data)):
            return
        if not self.first_ns and data:
            self.first_ns = now_ns
            if not self.began.done():
                self.began.set_result(None)
        self._parts.append(data)
        if self._chunked:
            over = self._tail().endswith(b"0\r\n\r\n")
        else:
            assert self._left is not None
            self._left -= len(data)
            over = self._left <= 0
        if over and not self.done.done():
            self.ended_ns = now_ns
            self.done.set_result(None)

    def _read_head(self, data: bytes) -> bytes:
        """The body's part of what has come, once the head is there."""
        whole = b"".join([*self._parts, data])
        at = whole.find(b"\r\n\r\n")
        if at < 0:
            self._parts = [whole]
            return b""
        self._parts = []
        self.head = whole[: at + 2].lower()
        found = self.head.find(b"\r\ncontent-length:")
        if found >= 0:
            self._left = int(self.head[found + 17 : self.head.index(b"\r\n", found + 2)])
        self._chunked = self._left is None
        return whole[at + 4 :]

    def _tail(self) -> bytes:
        last = self._parts[-1]
        return last if len(last) >= 5 or len(self._parts) < 2 else self._parts[-2] + last
