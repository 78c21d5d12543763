"""A relay of a Unix socket that can go bad: silent (half-open), cut, or deaf to new connections."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from pathlib import Path


class Relay:
    """Carries bytes between clients of `path` and the server at `target`, on one thread.

    While frozen it reads nothing and closes nothing: both ends believe in a connection that carries nothing, which is
    what a vanished peer or a firewall that forgot a flow looks like.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self._target = target
        self._peer: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._frozen: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def freeze(self) -> int:
        """What is connected now carries nothing any more, for ever; new connections do. How many were frozen."""
        with self._lock:
            for end in list(self._peer):
                if end not in self._frozen:
                    self._selector.unregister(end)
                    self._frozen.add(end)
            return len(self._frozen) // 2

    def deafen(self) -> None:
        """Who connects from here on is taken by nobody, and not refused either."""
        with self._lock:
            self._selector.unregister(self._listener)

    def hear(self) -> None:
        """Who connected meanwhile is carried after all, and so are new ones; what was frozen stays so."""
        with self._lock:
            self._selector.register(self._listener, selectors.EVENT_READ)

    def cut(self) -> int:
        """Close every connection; how many."""
        with self._lock:
            ends = list(self._peer)
            for end in ends:
                self._drop(end)
            return len(ends) // 2

    def close(self) -> None:
        self._closing = True
        self._thread.join(timeout=5)
        self.cut()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.1):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._peer and key.fileobj not in self._frozen:
                        self._carry(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.connect(str(self._target))
        except OSError:
            client.close()
            server.close()
            return
        self._peer[client], self._peer[server] = server, client
        for end in (client, server):
            self._selector.register(end, selectors.EVENT_READ)

    def _carry(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._peer[end].sendall(data)
                return
        except OSError:
            pass
        self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        peer = self._peer.pop(end, None)
        for one in (end, peer):
            if one is None:
                continue
            self._peer.pop(one, None)
            self._frozen.discard(one)
            with suppress(KeyError, ValueError):
                self._selector.unregister(one)
            one.close()
