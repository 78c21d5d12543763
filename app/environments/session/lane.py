"""One connection to a helper: frames out and in, with a deadline, within bounds."""

from __future__ import annotations

import mmap
import select
import socket
import time
from contextlib import suppress

from app.environments.session import protocol
from app.environments.session.connect import Immediate, Stream
from app.environments.session.protocol import HEADER, Kind

_BUFFER_BYTES = 320 << 10  # a piece of a file fits; the kernel gives memory for what is used of it


class LaneLost(Exception):
    """The connection ended (`ended`), nothing came in time, or what came was no answer."""

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class Lane:
    """Used by one thread at a time; only `abort` may be called from another."""

    def __init__(self, stream: Stream) -> None:
        self._stream: Stream = Immediate(stream) if isinstance(stream, socket.socket) else stream
        self._view = memoryview(mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._start = self._end = 0  # what was received and not yet taken
        self.deadline = 0.0  # monotonic; of everything that follows
        self._poll = select.poll()
        self._poll.register(stream.fileno(), select.POLLIN)

    def greet(self, timeout_s: float) -> None:
        """Hear who is there. Raises: LaneLost."""
        self.deadline = time.monotonic() + timeout_s
        kind, payload = self.receive(64)
        if kind is not Kind.HELLO or payload[:4] != protocol.MAGIC.to_bytes(4, "little"):
            raise LaneLost("expected a session helper, found something else")

    @property
    def quiet(self) -> bool:
        """True while an idle lane is as it should be: nothing to read, and no end."""
        return self._start == self._end and not self._poll.poll(0)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether something can be read within `timeout_s`."""
        if self._start < self._end:
            return True
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def send(self, data: bytes | memoryview) -> None:
        """Raises: LaneLost."""
        try:
            self._stream.settimeout(self._left())
            self._stream.sendall(data)
        except TimeoutError as error:
            raise LaneLost("it takes nothing any more") from error
        except OSError as error:
            raise LaneLost(f"the connection ended: {error}", ended=True) from error

    def send_data(self, data: memoryview) -> None:
        """One DATA frame."""
        self.send(HEADER.pack(protocol.VERSION, Kind.DATA, 0, len(data)))
        self.send(data)

    def receive(self, limit_bytes: int) -> tuple[Kind, memoryview]:
        """The next frame; its payload is valid until the next call.

        Raises: LaneLost: also for a payload longer than `limit_bytes`, or an unknown kind.
        """
        self._need(HEADER.size)
        version, number, _, size = HEADER.unpack_from(self._view, self._start)
        self._start += HEADER.size
        if version != protocol.VERSION or size > limit_bytes:
            raise LaneLost(f"expected a frame of at most {limit_bytes} bytes, found version {version}, {size} bytes")
        try:
            return Kind(number), self._payload(size)
        except ValueError as error:
            raise LaneLost(f"found a frame of unknown kind {number}") from error

    def _payload(self, size: int) -> memoryview:
        if size <= _BUFFER_BYTES:
            self._need(size)
            payload = self._view[self._start : self._start + size]
            self._start += size
            return payload
        # Memory only for what has come: a length is not yet a payload.
        whole = bytearray(self._view[self._start : self._end])
        self._start = self._end = 0
        while len(whole) < size:
            have = len(whole)
            whole.extend(bytes(min(size - have, max(1 << 20, have))))
            with memoryview(whole) as room:
                while have < len(room):
                    have += self._receive_into(room[have:])
        return memoryview(whole)

    def _need(self, size: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size > _BUFFER_BYTES:
            kept = bytes(self._view[self._start : self._end])
            self._view[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        while self._end - self._start < size:
            self._end += self._receive_into(self._view[self._end :])

    def _receive_into(self, room: memoryview) -> int:
        try:
            self._stream.settimeout(self._left())
            received = self._stream.recv_into(room)
        except TimeoutError as error:
            raise LaneLost("it does not answer") from error
        except OSError as error:
            raise LaneLost(f"the connection ended: {error}", ended=True) from error
        if not received:
            raise LaneLost("the connection ended", ended=True)
        return received

    def _left(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def abort(self) -> None:
        """Wake whoever waits here; it hears that the connection ended."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._stream.close()
