"""The engine's API over its socket, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import threading
from typing import Any
from urllib.parse import quote, urlsplit

VERSION = "v1.40"


class Refused(Exception):
    """The engine said no; `status` is its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the engine answered {status}: {reason}")
        self.status = status


class _Connection(http.client.HTTPConnection):
    def __init__(self, address: str) -> None:
        super().__init__("engine", timeout=300)
        self._address = address

    def connect(self) -> None:
        url = urlsplit(self._address)
        if url.scheme == "unix":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(url.path)
        else:
            self.sock = socket.create_connection((url.hostname or "localhost", url.port or 2375), timeout=self.timeout)


class Engine:
    """One connection per thread, kept open."""

    def __init__(self) -> None:
        self._address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._local = threading.local()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """JSON or bytes in, JSON or None out. Raises: Refused."""
        _, content = self.raw(method, path, body)
        return json.loads(content) if content and content[:1] in b"{[" else None

    def raw(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Raises: Refused."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
        connection = self._kept()
        try:
            connection.request(method, f"/{VERSION}{path}", data, {"Content-Type": kind})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise
        if answer.status >= 400:
            raise Refused(answer.status, content.decode("utf-8", "replace").strip())
        return answer.status, content

    def stream(self, path: str, body: Any) -> bytes:
        """What comes until the engine closes the connection. Raises: Refused."""
        connection = _Connection(self._address)
        try:
            connection.request("POST", f"/{VERSION}{path}", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status >= 400:
            raise Refused(answer.status, content.decode("utf-8", "replace").strip())
        return content

    def exists(self, container: str) -> bool:
        try:
            self.ask("GET", f"/containers/{quote(container)}/json")
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    def remove(self, container: str) -> None:
        """Kill and remove; gone already, or going, is fine."""
        try:
            self.ask("DELETE", f"/containers/{quote(container)}?force=1&v=1")
        except Refused as error:
            if error.status not in (404, 409):
                raise

    def remove_network(self, name: str) -> None:
        try:
            self.ask("DELETE", f"/networks/{quote(name)}")
        except Refused as error:
            if error.status != 404:
                raise

    def _kept(self) -> _Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = _Connection(self._address)
        kept: _Connection = self._local.connection
        if kept.sock is not None and select.select([kept.sock], [], [], 0)[0]:  # the engine has closed it
            kept.close()
        return kept


def joined(stream: bytes) -> bytes:
    """The output in an attached stream without terminal: frames of eight bytes' header and their content."""
    parts, at = [], 0
    while at + 8 <= len(stream):
        length = int.from_bytes(stream[at + 4 : at + 8], "big")
        parts.append(stream[at + 8 : at + 8 + length])
        at += 8 + length
    return b"".join(parts)
