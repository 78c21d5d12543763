"""Keeps the connections of one environment and closes all when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from app.environments.session.connection import Connect, ConnectionLost, HelperConnection
from app.errors import EnvironmentFailed

_GREETING_S = 10.0
_REPLACEMENT_S = 2.0
_MOST_IDLE = 16
"""Maximum idle connections; more are closed: each is a small process inside."""


class ConnectionPool:
    """Connections to one helper. Safe for many threads. All methods raise EnvironmentFailed once `close` was called.

    After the first connection, one stays connected: a helper without a connection takes its client for dead. Dedicated
    ones do not count, since they end with their program.
    """

    def __init__(self, connect: Connect, label: str, ended: Callable[[], None] | None = None) -> None:
        """ended: raises when the environment was ended for a reason, which overrides what is seen here."""
        self._connect = connect
        self._ended = ended
        self._label = label
        self._lock = threading.Lock()
        self._idle: list[HelperConnection] = []
        self._busy: set[HelperConnection] = set()
        self._dedicated: set[HelperConnection] = set()
        self.closed = False

    def wait_ready(self, timeout_s: float) -> None:
        """Returns as soon as a connection answers; asks every millisecond at first."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.001
        while True:
            try:
                return self.release(self.acquire(max(0.05, deadline - time.monotonic())))
            except EnvironmentFailed as error:
                if self.closed or time.monotonic() >= deadline:
                    raise self.failed(f"expected an answer within {timeout_s:.1f} s; {error}") from error
            time.sleep(pause_s)
            pause_s = min(0.02, pause_s * 1.2)

    @contextmanager
    def exchange(self, timeout_s: float) -> Iterator[HelperConnection]:
        """Yields a connection for one exchange that must be answered in `timeout_s`; a broken one is not used again."""
        connection = self.acquire()
        connection.deadline = time.monotonic() + timeout_s
        try:
            yield connection
        except ConnectionLost as error:
            self.discard(connection)
            raise self.lost(error) from error
        except BaseException:
            self.discard(connection)
            raise
        self.release(connection)

    def acquire(self, timeout_s: float = _GREETING_S) -> HelperConnection:
        """Returns a connection for the caller alone, to be released or discarded."""
        if self._ended is not None:
            self._ended()
        while True:
            with self._lock:
                if self.closed:
                    raise self.failed("was destroyed")
                connection = self._idle.pop() if self._idle else None
                if connection is not None:
                    self._busy.add(connection)
            if connection is None:
                return self._fresh(timeout_s)
            if connection.quiet:
                return connection
            self._close(connection)

    def acquire_dedicated(self) -> HelperConnection:
        """Returns a connection for the life of a program, to be discarded; another one stays connected."""
        if self._ended is not None:
            self._ended()
        connection = self._fresh(_GREETING_S)
        with self._lock:
            self._dedicated.add(connection)
        self._ensure_one()
        return connection

    def _ensure_one(self) -> None:
        with self._lock:
            if self.closed or self._idle or self._busy - self._dedicated:
                return
        with suppress(EnvironmentFailed):  # it is gone, which the next request will report
            self.release(self._fresh(_REPLACEMENT_S))

    def _fresh(self, timeout_s: float) -> HelperConnection:
        try:
            connection = HelperConnection(self._connect())
        except OSError as error:
            raise self.failed(f"cannot be reached: {error}") from error
        with self._lock:
            self._busy.add(connection)
            closed = self.closed
        if closed:
            connection.abort()
        try:
            connection.greet(timeout_s)
        except ConnectionLost as error:
            self._close(connection)
            raise self.lost(error) from error
        return connection

    def release(self, connection: HelperConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            keep = not self.closed and len(self._idle) < _MOST_IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    @property
    def count(self) -> int:
        """Number of connections."""
        with self._lock:
            return len(self._idle) + len(self._busy)

    def discard(self, connection: HelperConnection) -> None:
        """Closes it. If it was the last one, a new one is opened."""
        self._close(connection)
        self._ensure_one()

    def _close(self, connection: HelperConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            self._dedicated.discard(connection)
        connection.close()

    def alive(self, timeout_s: float = 2.0) -> bool:
        """Whether the helper answers on a new connection: the idle ones may be about to end for the same reason."""
        try:
            self.release(self._fresh(timeout_s))
        except EnvironmentFailed:
            return False
        return True

    def close(self) -> None:
        """Cuts off running requests at once. Safe to call twice, from any thread."""
        with self._lock:
            self.closed = True
            idle, busy = self._idle, list(self._busy)
            self._idle = []
        for connection in busy:
            connection.abort()
        for connection in idle:
            connection.close()

    def lost(self, error: ConnectionLost) -> EnvironmentFailed:
        return self.failed("was destroyed" if self.closed else f"is gone: {error}")

    def failed(self, what: str) -> EnvironmentFailed:
        if self._ended is not None:
            self._ended()
        return EnvironmentFailed(f"environment {self._label} {what}.")
