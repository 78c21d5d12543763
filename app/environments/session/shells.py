"""Long-lived programs: a shell with state, and a program with input and output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.environments.session import protocol
from app.environments.session.commands import LongStreams, receive_result, result_after_loss, start
from app.environments.session.connection import ConnectionLost, HelperConnection
from app.environments.session.connection_pool import ConnectionPool
from app.environments.session.protocol import CHUNK_BYTES, FrameKind, frame
from app.models.shell import CommandResult, OutputLogs

_SHELL_S = 15.0
_EXCHANGE_S = 30.0
_UNREAD_BYTES = 16 << 20
"""Maximum output that `wait` stores; more stays inside until it is read."""


def _open(pool: ConnectionPool, connection: HelperConnection, request: bytes, timeout_s: float, failed: str) -> None:
    connection.deadline = time.monotonic() + timeout_s
    try:
        connection.send(request)
        kind, payload = connection.receive(2048)
        if kind is FrameKind.OK:
            return
        if kind is not FrameKind.FAILED:
            raise ConnectionLost(f"expected a started program, found {kind.name}")
        problem = protocol.failure(payload)[2].strip()
    except (ConnectionLost, ValueError) as error:
        pool.discard(connection)
        raise pool.lost(error if isinstance(error, ConnectionLost) else ConnectionLost(f"found {error}")) from error
    pool.discard(connection)
    raise pool.failed(f"{failed}: {problem}")


class ShellSession:
    """A shell that keeps folder, exports, variables and functions; one command at a time, others wait."""

    def __init__(
        self,
        pool: ConnectionPool,
        request: bytes,
        limit_bytes: int,
        logs: Callable[[], OutputLogs | None] = lambda: None,
    ) -> None:
        """`request` opens the shell. It is sent again after the shell's connection was lost."""
        self._logs = logs
        self._pool = pool
        self._request = request
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._connection: HelperConnection | None = self._fresh()

    def _fresh(self) -> HelperConnection:
        connection = self._pool.acquire()
        _open(self._pool, connection, self._request, _SHELL_S, "gives no shell")
        return connection

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Runs `command` in the shell; its input is empty.

        When the command ends the shell (`exit`, `exec`, `set -e`, a signal), its status is the exit code, and the next
        command gets a new shell with the folder and the exports of the old one. The same after a timeout, which kills
        all that this command started, but not what earlier ones left running.
        Raises: EnvironmentFailed: the environment is gone, or the session was closed.
        """
        begun = time.monotonic()
        timeout_ms = protocol.milliseconds(timeout_s)
        with self._lock, LongStreams(self._logs(), command) as streams:
            request = protocol.shell_run(
                protocol.encoded(command), timeout_ms=timeout_ms, log_bytes=streams.limit_bytes
            )
            if self._closed:
                raise self._pool.failed("is asked to run a command in a shell that was closed")
            self._connection = connection = self._connection or self._fresh()
            try:
                start(connection, request, timeout_s)
                return receive_result(connection, self._limit_bytes, streams, begun=begun)
            except ConnectionLost as error:
                self._connection = None
                self._pool.discard(connection)
                if self._closed:
                    raise self._pool.failed("had a command under way in a shell that was closed") from error
                return result_after_loss(self._pool, error, begun=begun)

    def close(self) -> None:
        """Ends the shell; its background processes live on. Safe to call twice.

        A running command ends with EnvironmentFailed, killed with all that the shell started.
        """
        self._closed = True
        if not self._lock.acquire(blocking=False):
            connection = self._connection
            if connection is not None:
                connection.abort()
            return
        try:
            if self._connection is not None:
                self._end(self._connection)
        finally:
            self._lock.release()

    def _end(self, connection: HelperConnection) -> None:
        self._connection = None
        connection.deadline = time.monotonic() + _SHELL_S
        try:
            connection.send(frame(FrameKind.SHELL_CLOSE))
            ended = connection.receive(64)[0] is FrameKind.OK
        except ConnectionLost:
            ended = False
        if ended:
            self._pool.release(connection)
        else:
            self._pool.discard(connection)


class SessionProgram:
    """A running program with pipes or a terminal, for one reader and one writer. Raises: EnvironmentFailed."""

    def __init__(self, pool: ConnectionPool, request: bytes) -> None:
        self._pool = pool
        self._exit_code: int | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._inside = 0  # calls that use the connection just now
        self._unread: list[bytes] = []
        self._connection = connection = pool.acquire_dedicated()
        _open(pool, connection, request, _EXCHANGE_S, "starts no such program")

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """Reads the next output (both streams, in order); b"" at the end, None when nothing came within `timeout_s`."""
        if self._unread:
            return self._unread.pop(0)
        if self._exit_code is not None or self._closed:
            return b""
        return self._next(timeout_s)

    def _next(self, timeout_s: float | None) -> bytes | None:
        with self._using() as connection:
            if connection is None:
                return b""
            try:
                if not connection.wait(timeout_s):
                    return None
                connection.deadline = time.monotonic() + _EXCHANGE_S
                kind, payload = connection.receive(CHUNK_BYTES)
                if kind in (FrameKind.OUT, FrameKind.ERR):
                    return bytes(payload)
                if kind is not FrameKind.EXIT or len(payload) < 4:
                    raise ConnectionLost(f"expected output, found {kind.name}")
            except ConnectionLost as error:
                if self._closed:
                    return b""
                raise self._pool.lost(error) from error
            self._exit_code = int.from_bytes(payload[:4], "little")
            return b""

    @contextmanager
    def _using(self) -> Iterator[HelperConnection | None]:
        """Yields the connection, which stays open for the block; None once it was closed.

        A descriptor closed while another thread is about to wait for it may then be another file's.
        """
        with self._lock:
            closed = self._closed
            self._inside += not closed
        if closed:
            yield None
            return
        try:
            yield self._connection
        finally:
            with self._lock:
                self._inside -= 1
                last = self._closed and self._inside == 0
            if last:
                self._pool.discard(self._connection)

    def write(self, data: bytes) -> None:
        """Sends input. Input that is not read is refused after some megabytes and half a minute."""
        view = memoryview(data)
        for at in range(0, len(view), CHUNK_BYTES):
            piece = view[at : at + CHUNK_BYTES]
            self._send(protocol.HEADER.pack(protocol.VERSION, FrameKind.DATA, 0, len(piece)) + piece)

    def close_input(self) -> None:
        """Ends the input."""
        self._send(frame(FrameKind.END))

    def resize(self, rows: int, columns: int) -> None:
        """Sets the terminal's size."""
        self._send(frame(FrameKind.RESIZE, rows.to_bytes(4, "little") + columns.to_bytes(4, "little")))

    def signal(self, number: int) -> None:
        """Sends a signal to the program's process group (of a terminal: the foreground group)."""
        self._send(frame(FrameKind.SIGNAL, number.to_bytes(4, "little")))

    def _send(self, data: bytes) -> None:
        with self._using() as connection:
            if self._exit_code is not None or connection is None:
                return  # like a write to a pipe without a reader, but without the signal
            connection.deadline = time.monotonic() + _EXCHANGE_S
            try:
                connection.send(data)
            except ConnectionLost as error:
                raise self._pool.lost(error) from error

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the exit code (128 + n for a signal); None: it runs on. Output met meanwhile stays for `read`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._exit_code is None and not self._closed:
            if sum(map(len, self._unread)) > _UNREAD_BYTES:
                return None
            data = self._next(None if until is None else max(0.0, until - time.monotonic()))
            if data is None:
                return None
            if data:
                self._unread.append(data)
        return self._exit_code

    def close(self) -> None:
        """Kills it with all that it started, unless it has ended. Safe to call twice, and from another thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = self._inside == 0
            self._connection.abort()  # the helper kills the program when the connection ends
        if last:
            self._pool.discard(self._connection)
