"""HTTP servers of tests: a handler that answers in one call and prints nothing, and a server for a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import Any, TypeVar

S = TypeVar("S", bound=BaseServer)


class Handler(BaseHTTPRequestHandler):
    def respond(self) -> None:
        """To every request."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.respond()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the base's names

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size + 2)[:size])
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""


@contextmanager
def running(server: S) -> Iterator[S]:
    """It serves for the length of the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(handler: Callable[..., Any], port: int = 0) -> Iterator[str]:
    """`127.0.0.1:PORT` of a server with this handler."""
    with running(ThreadingHTTPServer(("127.0.0.1", port), handler)) as server:
        yield f"127.0.0.1:{server.server_port}"
