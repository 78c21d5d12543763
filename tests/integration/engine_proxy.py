"""A container engine that refuses, or is away: a socket before a real one, which relays all else."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from urllib.parse import urlsplit

from tests.integration.http_server import Handler, running
from tests.services import short_folder


class EngineProxy(ThreadingMixIn, UnixStreamServer):
    """`refusals`: status and message, by what the request's line begins with. Whole answers only: no streams.

    `lost`: beginnings of requests that are carried out, and whose answer does not come back.
    """

    daemon_threads = True

    def __init__(self, path: Path, target: str) -> None:
        super().__init__(str(path), _Relay)
        self.url = f"unix://{path}"
        self.target = urlsplit(target).path
        self.refusals: dict[str, tuple[int, str]] = {}
        self.dropped: dict[str, bool] = {}
        self.lost: set[str] = set()
        self.away = threading.Event()
        self._path = path

    def leave(self) -> None:
        """Nobody listens from then on, until it comes back."""
        self._path.rename(self._path.with_suffix(".away"))
        self.away.set()

    def come_back(self) -> None:
        self.dropped.clear()
        self.away.clear()
        self._path.with_suffix(".away").rename(self._path)

    def drop_removal(self, container_id: str, *, leaves: bool) -> None:
        """The call gets no answer; with `leaves`, nobody listens from then on."""
        self.dropped[f"DELETE /containers/{container_id}"] = leaves

    def refuse_removal(self, container_id: str, status: int, message: str) -> None:
        self.refusals[f"DELETE /containers/{container_id}"] = (status, message)


@contextmanager
def engine_proxy(target: str) -> Iterator[EngineProxy]:
    """Before the engine at `target`, a Unix socket's URL, for the length of the block."""
    with short_folder() as folder, running(EngineProxy(folder / "engine.sock", target)) as server:
        yield server


class _Relay(Handler):
    server: EngineProxy

    def respond(self) -> None:
        body = self.body()
        line = f"{self.command} /{self.path.lstrip('/').partition('/')[2]}"  # without the version
        dropped = [leaves for what, leaves in self.server.dropped.items() if line.startswith(what)]
        if dropped:
            if dropped[0]:
                self.server.leave()
            return
        refused = [answer for what, answer in self.server.refusals.items() if line.startswith(what)]
        status, content = self._refused(*refused[0]) if refused else self._relayed(body)
        if any(line.startswith(what) for what in self.server.lost):
            return
        self.answer(status, content, {"Content-Type": "application/json"})

    @staticmethod
    def _refused(status: int, message: str) -> tuple[int, bytes]:
        return status, json.dumps({"message": message}).encode()

    def _relayed(self, body: bytes) -> tuple[int, bytes]:
        engine = _Connection(self.server.target)
        try:
            kind = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            engine.request(self.command, self.path, body, kind)
            answer = engine.getresponse()
            return answer.status, answer.read()
        finally:
            engine.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)
