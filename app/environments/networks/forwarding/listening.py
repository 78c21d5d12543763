"""Serves a listening socket: one thread accepts, one thread per connection."""

from __future__ import annotations

import os
import select
import socket
import threading
from contextlib import suppress

import structlog

from app.environments.contract import Serve

log = structlog.get_logger()

CONNECTIONS = 64
"""Maximum connections served at a time for a port; more wait in the backlog, where they cost nothing here."""
_BACKLOG = 128
_REST_MS = 200
"""Pause in milliseconds of a port that could not be served for lack of descriptors or threads."""


class ListeningForward:
    """A `Forward` until it is closed or `process` (a handle) has ended. Owns the listeners and the handle."""

    def __init__(
        self,
        listeners: list[socket.socket],
        serve: Serve,
        *,
        process: int | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        self.port: int = listeners[0].getsockname()[1]
        self._serve = serve
        self._most = connections
        self._process = process
        self._listeners = listeners
        self._served: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        threading.Thread(target=self._accept_all, name="forward-accept", daemon=True).start()

    def close(self) -> None:
        """Stops accepting connections and shuts the sockets of existing ones. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
            for listener in self._listeners:
                _shut(listener)  # also for a forked process that holds a copy
                listener.close()
            if self._process is not None:
                os.close(self._process)
            for connection in self._served:
                _shut(connection)

    def _accept_all(self) -> None:
        rest = False
        while (poll := self._events(rest=rest)) is not None:
            ready = {number for number, _ in poll.poll(_REST_MS if rest else None)}
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if self._process in ready:
                log.debug("forward.process_ended", port=self.port)
                self.close()
            rest = not self._accept(ready)
        os.close(self._wake)

    def _events(self, *, rest: bool) -> select.poll | None:
        poll = select.poll()
        with self._lock:
            if self._closed:
                return None
            poll.register(self._wake, select.POLLIN)
            if self._process is not None:
                poll.register(self._process, select.POLLIN)
            if not rest and len(self._served) < self._most:
                for listener in self._listeners:
                    poll.register(listener, select.POLLIN)
        return poll

    def _accept(self, ready: set[int]) -> bool:
        """Accepts connections. False: one could not be served, and others must end first."""
        with self._lock:
            for listener in [] if self._closed else self._listeners:
                if listener.fileno() not in ready or len(self._served) == self._most:
                    continue
                try:
                    connection, _ = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError as error:  # no descriptors, no memory
                    log.warning("forward.not_accepted", port=self.port, error=str(error))
                    return False
                connection.setblocking(True)
                thread = threading.Thread(target=self._attend, args=(connection,), name="forward-serve", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # too many threads
                    log.warning("forward.not_served", port=self.port, error=str(error))
                    connection.close()
                    return False
                self._served.add(connection)
        return True

    def _attend(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve(connection)
        except OSError as error:
            log.debug("forward.connection_broken", port=self.port, error=str(error))
        finally:
            with self._lock:
                self._served.discard(connection)
                if len(self._served) == self._most - 1 and not self._closed:
                    os.eventfd_write(self._wake, 1)
            connection.close()


def listen(port: int) -> list[socket.socket]:
    """Opens sockets that listen at 127.0.0.1:`port` and, if possible, at [::1] too. Raises: OSError."""
    first = _listening(socket.AF_INET, "127.0.0.1", port)
    with suppress(OSError):  # no IPv6, or its port is taken: `localhost` is also 127.0.0.1
        return [first, _listening(socket.AF_INET6, "::1", first.getsockname()[1])]
    return [first]


def _listening(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # `create_server` allows the port of an ended listener again.
    server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    server.setblocking(False)
    return server


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)
