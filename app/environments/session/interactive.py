"""A program that is talked to while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from app.environments.session import protocol
from app.environments.session.lane import Lane, LaneLost
from app.environments.session.lanes import Lanes
from app.environments.session.protocol import CHUNK_BYTES, Kind, frame
from app.environments.session.shells import reason

_PATIENCE_S = 30.0
_KEPT_BYTES = 16 << 20
"""Of output that `wait` meets on its way; more stays inside until it is read."""


class Interactive:
    """A running program with pipes or a terminal. Whoever opened it closes it. For one reader and one writer.

    Raises: EnvironmentFailed, from every method, when the environment is gone.
    """

    def __init__(self, lanes: Lanes, request: bytes) -> None:
        self._lanes = lanes
        self._exit_code: int | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._inside = 0  # who is using the lane just now
        self._unread: list[bytes] = []
        self._lane = lane = lanes.take_apart()
        self._deadline(_PATIENCE_S)
        try:
            lane.send(request)
            kind, payload = lane.receive(2048)
            problem = None if kind is Kind.OK else reason(kind, payload)
        except LaneLost as error:
            lanes.drop(lane)
            raise lanes.lost(error) from error
        if problem is not None:
            lanes.drop(lane)
            raise lanes.failed(f"starts no such program: {problem}")

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """What it wrote next (both streams, as it came); b"" at the end, None when nothing came within `timeout_s`."""
        if self._unread:
            return self._unread.pop(0)
        if self._exit_code is not None or self._closed:
            return b""
        return self._next(timeout_s)

    def _next(self, timeout_s: float | None) -> bytes | None:
        with self._using() as lane:
            if lane is None:
                return b""
            try:
                if not lane.wait(timeout_s):
                    return None
                self._deadline(_PATIENCE_S)
                kind, payload = lane.receive(CHUNK_BYTES)
                if kind in (Kind.OUT, Kind.ERR):
                    return bytes(payload)
                if kind is not Kind.EXIT or len(payload) < 4:
                    raise LaneLost(f"expected output, found {kind.name}")
            except LaneLost as error:
                if self._closed:
                    return b""
                raise self._lanes.lost(error) from error
            self._exit_code = int.from_bytes(payload[:4], "little")
            return b""

    @contextmanager
    def _using(self) -> Iterator[Lane | None]:
        """The lane, which stays open for the block; None once it was closed.

        A descriptor that is closed while another thread is about to wait for it may by then be somebody else's.
        """
        with self._lock:
            closed = self._closed
            self._inside += not closed
        if closed:
            yield None
            return
        try:
            yield self._lane
        finally:
            with self._lock:
                self._inside -= 1
                last = self._closed and self._inside == 0
            if last:
                self._lanes.drop(self._lane)

    def write(self, data: bytes) -> None:
        """Send input. One that nobody reads is refused after some megabytes and half a minute."""
        view = memoryview(data)
        for at in range(0, len(view), CHUNK_BYTES):
            piece = view[at : at + CHUNK_BYTES]
            self._send(protocol.HEADER.pack(protocol.VERSION, Kind.DATA, 0, len(piece)) + piece)

    def close_input(self) -> None:
        """End of input."""
        self._send(frame(Kind.END))

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal its size."""
        self._send(frame(Kind.RESIZE, rows.to_bytes(4, "little") + columns.to_bytes(4, "little")))

    def signal(self, number: int) -> None:
        """Send a signal to the program's process group (of a terminal: to the one in front)."""
        self._send(frame(Kind.SIGNAL, number.to_bytes(4, "little")))

    def _send(self, data: bytes) -> None:
        with self._using() as lane:
            if self._exit_code is not None or lane is None:
                return  # to nobody: as with a pipe whose reader has gone, but without the signal
            self._deadline(_PATIENCE_S)
            try:
                lane.send(data)
            except LaneLost as error:
                raise self._lanes.lost(error) from error

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code (128 + n for a signal), or None when it runs on after `timeout_s`.

        Output met on the way stays for `read`.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._exit_code is None and not self._closed:
            if sum(map(len, self._unread)) > _KEPT_BYTES:
                return None
            data = self._next(None if until is None else max(0.0, until - time.monotonic()))
            if data is None:
                return None
            if data:
                self._unread.append(data)
        return self._exit_code

    def close(self) -> None:
        """Kill it with all that it started, unless it has ended. Safe to call twice, and from another thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = self._inside == 0
            self._lane.abort()  # the helper kills when the connection goes; whoever waits wakes
        if last:
            self._lanes.drop(self._lane)

    def _deadline(self, seconds: float) -> None:
        self._lane.deadline = time.monotonic() + seconds
