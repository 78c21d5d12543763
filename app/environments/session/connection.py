"""Connection to a helper: sends and receives frames within deadlines and limits."""

from __future__ import annotations

import mmap
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from app.environments.session import protocol
from app.environments.session.protocol import HEADER, FrameKind

_ACCEPT_S = 5
"""Time limit for a place in the queue of a listener that accepts nothing."""
_BACKLOG = 128
_BUFFER_BYTES = 320 << 10  # a piece of a file fits; the kernel allocates only what is used


class ByteStream(Protocol):
    """A stream that never blocks. `fileno` is polled, so the stream must not hold back bytes that it has read."""

    def setblocking(self, flag: bool, /) -> None: ...
    def send(self, data: memoryview, /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...


Connect = Callable[[], ByteStream]
"""Opens a new connection. Raises OSError when there is none (yet)."""


def unix_connector(path: Path) -> Connect:
    """Connects to the socket at `path`, of any length; follows no link, as it could lead anywhere on this host."""

    def connect() -> socket.socket:
        # Open the socket itself, check it, connect through the descriptor: it cannot be exchanged in between.
        place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(place).st_mode):
                raise FileNotFoundError(f"expected the helper's socket at {path}, found something else.")
            return connect_to(place)
        finally:
            os.close(place)

    return connect


def connect_to(place: int) -> socket.socket:
    """Connects to the socket behind a descriptor of its path; the kernel limits the wait. Raises: OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _ACCEPT_S, 0))
        connection.connect(f"/proc/self/fd/{place}")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 0))
    except BlockingIOError as error:
        connection.close()
        raise TimeoutError(f"expected the helper to accept a connection in {_ACCEPT_S} s, found it busy.") from error
    except OSError:
        connection.close()
        raise
    return connection


def listen_in(folder: Path, name: str) -> socket.socket:
    """Opens a socket that listens there, for this user alone, whatever the path's length. Raises: OSError."""
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"/proc/self/fd/{place}/{name}")  # a socket's name has 107 bytes at most
        os.chmod(folder / name, 0o600)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(place)
    return listener


class StreamCut(ConnectionError):
    """A stream was cut on its way: the state inside is unknown. Raised where a socket would end."""


class ConnectionLost(Exception):
    """The connection ended inside (`ended`), nothing came in time, or the reply was invalid."""

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class HelperConnection:
    """A connection for one thread at a time; only `abort` may be called from another."""

    def __init__(self, stream: ByteStream) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._view = memoryview(mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._start = self._end = 0  # received bytes that are not read yet
        self.deadline = 0.0  # monotonic; of everything that follows
        self._poll = select.poll()
        self._poll.register(stream.fileno(), select.POLLIN)

    def greet(self, timeout_s: float) -> None:
        """Receives the helper's greeting. Raises: ConnectionLost."""
        self.deadline = time.monotonic() + timeout_s
        kind, payload = self.receive(64)
        if kind is not FrameKind.HELLO or payload[:4] != protocol.MAGIC.to_bytes(4, "little"):
            raise ConnectionLost("expected a session helper, found something else")

    @property
    def quiet(self) -> bool:
        """Whether an idle connection is healthy: nothing to read, and not ended."""
        return self._start == self._end and not self._poll.poll(0)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether something can be read within `timeout_s`."""
        if self._start < self._end:
            return True
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def send(self, data: bytes | memoryview) -> None:
        """Raises: ConnectionLost."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[self._stream.send(left) :]
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(self._stream.fileno(), select.POLLOUT)
                    if not poll.poll(self._left_ms()):
                        raise ConnectionLost("it takes nothing any more") from None
        except (OSError, ValueError) as error:  # ValueError: closed
            raise _lost(error) from error

    def send_data(self, data: memoryview) -> None:
        """Sends one DATA frame."""
        self.send(HEADER.pack(protocol.VERSION, FrameKind.DATA, 0, len(data)))
        self.send(data)

    def receive(self, limit_bytes: int) -> tuple[FrameKind, memoryview]:
        """Reads the next frame, valid until the next call. Raises: ConnectionLost: also too long or of unknown kind."""
        self._need(HEADER.size)
        version, number, _, size = HEADER.unpack_from(self._view, self._start)
        self._start += HEADER.size
        if version != protocol.VERSION or size > limit_bytes:
            raise ConnectionLost(
                f"expected a frame of at most {limit_bytes} bytes, found version {version}, {size} bytes"
            )
        try:
            return FrameKind(number), self._payload(size)
        except ValueError as error:
            raise ConnectionLost(f"found a frame of unknown kind {number}") from error

    def _payload(self, size: int) -> memoryview:
        if size <= _BUFFER_BYTES:
            self._need(size)
            payload = self._view[self._start : self._start + size]
            self._start += size
            return payload
        # Allocates memory only for received bytes: the length alone is not trusted.
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
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        while self._end - self._start < size:
            self._end += self._receive_into(self._view[self._end :])

    def _receive_into(self, room: memoryview) -> int:
        try:
            while True:
                try:
                    received = self._stream.recv_into(room)
                    break
                except BlockingIOError:
                    if not self._poll.poll(self._left_ms()):
                        raise ConnectionLost("it does not answer") from None
        except OSError as error:
            raise _lost(error) from error
        if not received:
            raise ConnectionLost("the connection ended", ended=True)
        return received

    def _left_ms(self) -> float:
        return max(1.0, (self.deadline - time.monotonic()) * 1000)

    def abort(self) -> None:
        """Shuts the connection, from any thread; a thread that waits for it sees its end."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._stream.close()


def _lost(error: OSError | ValueError) -> ConnectionLost:
    return ConnectionLost(f"the connection ended: {error}", ended=not isinstance(error, StreamCut))
