"""A server that answers obstore as Google Cloud Storage's XML API would, as far as artifacts need it. Loopback only."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class _Store(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}  # by /bucket/key
        self.buckets: set[str] = set()
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Store

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        names = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "x-goog-generation": "1"}
        names |= {"Last-Modified": "Thu, 26 Nov 2026 12:00:00 GMT", **headers}
        for name, value in {"Content-Length": str(len(content)), **names}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _bucket(self, path: str) -> bool:
        return path.split("/")[1] in self.server.buckets

    def _asked(self) -> tuple[str, dict[str, list[str]], bytes]:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return unquote(parts.path), parse_qs(parts.query, keep_blank_values=True), body

    def do_PUT(self) -> None:
        path, _, body = self._asked()
        exclusive = self.headers.get("x-goog-if-generation-match") == "0"
        with self.server.lock:
            if not self._bucket(path):
                self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            elif exclusive and path in self.server.objects:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            else:
                self.server.objects[path] = body
                self._answer(200)

    def do_GET(self) -> None:
        path, query, _ = self._asked()
        with self.server.lock:
            content = self.server.objects.get(path)
        if not self._bucket(path):
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif "list-type" in query:
            self._answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        elif content is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._answer(200, content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        path, _, _ = self._asked()
        with self.server.lock:
            self.server.objects.pop(path, None)
        self._answer(204)


@contextmanager
def serving_gcs(*buckets: str) -> Iterator[str]:
    """The content of a service account's file that leads to a server with these buckets, and asks for no login."""
    server = _Store()
    server.buckets.update(buckets)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        account = {"gcs_base_url": f"http://127.0.0.1:{server.server_address[1]}", "disable_oauth": True}
        yield json.dumps(account | {"client_email": "", "private_key": "", "private_key_id": ""})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
