"""A listening socket whose connections go to `serve`, a thread each, so many at a time."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import structlog

from app.environments.contract import Serve
from app.environments.networks.forwarding.acceptor import acceptor

log = structlog.get_logger()

CONNECTIONS = 64
"""Served at a time for one port; more wait in the backlog, where they cost us nothing."""
_BACKLOG = 128


class Listening:
    """A `Forward`: takes connections until it is closed, or the process of the handle `process` has ended.

    Owns the listeners (sockets of one port) and the handle.
    """

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
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._served: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._acceptor = acceptor()
        watched = [*self._listeners, *([] if process is None else [process])]
        self._acceptor.watch(dict.fromkeys(watched, self._ready))

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Take no more connections and end those there are: whoever serves them finds them shut. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            numbers = [*self._listeners, *([] if self._process is None else [self._process])]
            self._acceptor.forget(numbers)
            for listener in self._listeners.values():
                _shut(listener)  # also for a forked process that holds a copy
                listener.close()
            if self._process is not None:
                os.close(self._process)
            for connection in self._served:
                _shut(connection)

    # --- In the thread that accepts ---------------------------------------------------------------------------------

    def _ready(self, number: int) -> None:
        if number == self._process:
            log.debug("forward.process_ended", port=self.port)
            self.close()
            return
        with self._lock:
            if self._closed:
                return
            try:
                connection, _ = self._listeners[number].accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, no memory: others' connections end, then there are some
                log.warning("forward.not_accepted", port=self.port, error=str(error))
                self._acceptor.rest(number)
                return
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        thread = threading.Thread(target=self._attend, args=(connection,), name="forward-serve", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads
            log.warning("forward.not_served", port=self.port, error=str(error))
            connection.close()
            return
        self._served.add(connection)
        if len(self._served) == self._most:
            self._acceptor.pause(list(self._listeners))

    # --- In a connection's thread -----------------------------------------------------------------------------------

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
                    self._acceptor.resume(list(self._listeners))
            connection.close()


def listen(port: int) -> list[socket.socket]:
    """Sockets that listen at 127.0.0.1:`port` and, where there is such a thing, at [::1] too. Raises: OSError."""
    first = _listening(socket.AF_INET, "127.0.0.1", port)
    with suppress(OSError):  # no IPv6, or the other one's port is taken: `localhost` is the first, too
        return [first, _listening(socket.AF_INET6, "::1", first.getsockname()[1])]
    return [first]


def _listening(family: int, host: str, port: int) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of an ended one can be had again
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((host, port))
        found.listen(_BACKLOG)
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found


def _shut(found: socket.socket) -> None:
    with suppress(OSError):  # it is not connected any more
        found.shutdown(socket.SHUT_RDWR)
