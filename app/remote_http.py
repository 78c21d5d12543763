"""Sends requests to the HTTP API with the standard library: retries, errors by name, event streams.

Never uses a proxy or follows a redirection: the token goes only to the server that was named.
"""

from __future__ import annotations

import http.client
import json
import math
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from typing import IO, Any, TypeVar
from urllib.parse import urlencode, urlsplit

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from app import errors
from app.errors import (
    MegaFlowError,
    NotSignedIn,
    ServerUnavailable,
    SettingsInvalid,
    StackNotRunning,
    TooManyRequests,
)
from app.settings_checks import is_base

Model = TypeVar("Model")

PREFIX = "/api/v1"
_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses between retries, in seconds; the last one repeats."""
_FIRST_S = 10.0
"""Retry time in seconds for a server that has never answered: its address may be wrong."""
_AGAIN = (429, 502, 503, 504)
_ALIVE_S = 45.0
"""Read timeout of a stream, in seconds; the server sends something at least every 15 seconds."""
_MOST_LINE = 64 << 20
_OBJECT = TypeAdapter(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Ask:
    """HTTP request. again: repeating it has no further effect, so it may be retried; always true for GET."""

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    again: bool = False
    timeout_s: float = 60.0
    patience_s: float = math.inf
    """Retry limit in seconds, when less than the server's."""

    @property
    def target(self) -> str:
        """Path and query of the request line, without parameters that are None."""
        given = {name: [_text(part) for part in _listed(one)] for name, one in self.query.items() if one is not None}
        return PREFIX + self.path + (f"?{urlencode(given, doseq=True)}" if given else "")


@dataclass(frozen=True, slots=True)
class ServerReply:
    """Content of a response, and its headers by lower-case name."""

    content: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """Event of a stream. An id without data only gives the stream's position."""

    id: str
    data: dict[str, Any] | None


class WebServer:
    """Client of one web server, with its token. Thread-safe: each request has its own connection."""

    def __init__(self, url: str, token: str, patience_s: float) -> None:
        """Raises: SettingsInvalid, NotSignedIn: there is no token."""
        parts = urlsplit(url)
        if not is_base(url) or parts.hostname is None:
            raise SettingsInvalid(
                f"server: expected http://HOST:PORT or https://HOST, found {parts.hostname or 'none'}"
            )
        if not token or not token.isascii() or not token.isprintable():
            raise NotSignedIn(
                "expected a token for the server (the variable MEGAFLOW_TOKEN, or `token=`), found none that could be"
                " one; an administrator makes it: `megaflow users add NAME`"
            )
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._met = False
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": "megaflow"}

    def json(self, asked: Ask) -> dict[str, Any]:
        """Sends a request and returns the response as JSON. Raises: as `ask`."""
        return self.read(_OBJECT, self.ask(asked).content)

    def read(self, kind: TypeAdapter[Model], content: bytes) -> Model:
        """Parses a response. Raises: ServerUnavailable: it does not fit, so a different server listens there."""
        try:
            return kind.validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ServerUnavailable(
                f"expected an answer of MegaFlow's web server at {self.url}, found another one ({first['msg'][:200]});"
                " is the server of this release?"
            ) from None

    def ask(self, asked: Ask, into: IO[bytes] | None = None) -> ServerReply:
        """Sends a request; retries while the server is away, where that is safe. into: file for the response's content.

        Raises: MegaFlowError: the server's refusal, as the class that it names; ServerUnavailable.
        """
        patience_s = self.patience_s if self._met else min(self.patience_s, _FIRST_S)
        until, tries = time.monotonic() + min(patience_s, asked.patience_s), 0
        while True:
            try:
                return self._once(asked, into)
            except (ServerUnavailable, TooManyRequests) as error:
                safe = asked.again or asked.method == "GET" or isinstance(error, _NeverSent | TooManyRequests)
                if not safe or time.monotonic() >= until:
                    raise
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1

    def _once(self, asked: Ask, into: IO[bytes] | None) -> ServerReply:
        with closing(self._connection(asked.timeout_s)) as connection:
            reply = self._sent(connection, asked, {})
            content = self._tried(lambda: _copied(reply, into) if into and reply.status == 200 else reply.read())
            self._met = True
            if reply.status not in (200, 206):
                raise refusal(reply.status, content, self.url)
            return ServerReply(content, {name.lower(): value for name, value in reply.getheaders()})

    def events(self, asked: Ask, last_id: str, stop: threading.Event | None) -> Iterator[ServerSentEvent]:
        """Yields the events of a stream until it ends or `stop` is set; never retries. Raises: as `ask`."""
        more = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        ended = threading.Event()
        with closing(self._connection(_ALIVE_S)) as connection:
            reply = self._sent(connection, asked, more)
            if reply.status != 200:
                raise refusal(reply.status, self._tried(reply.read), self.url)
            if stop is not None:
                threading.Thread(target=_end_when, args=(stop, ended, connection), daemon=True).start()
            try:
                yield from self._blocks(reply, stop)
            finally:
                ended.set()

    def _blocks(self, reply: http.client.HTTPResponse, stop: threading.Event | None) -> Iterator[ServerSentEvent]:
        event_id, data = "", list[str]()
        while stop is None or not stop.is_set():
            try:
                line = self._tried(lambda: reply.readline(_MOST_LINE)).decode("utf-8", "replace")
            except ServerUnavailable:
                if stop is not None and stop.is_set():
                    return
                raise
            if not line:
                return
            name, _, value = line.rstrip("\r\n").partition(":")
            value = value.removeprefix(" ")
            if name == "id":
                event_id = value
            elif name == "data":
                data.append(value)
            elif not line.strip():
                if event_id or data:
                    yield ServerSentEvent(event_id, self.read(_OBJECT, "\n".join(data).encode()) if data else None)
                event_id, data = "", []

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        return self._kind(self._host, self._port, timeout=timeout_s)

    def _sent(
        self, connection: http.client.HTTPConnection, asked: Ask, more: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        headers, content = {**self._headers, **more}, None
        if asked.body is not None:
            content, headers["Content-Type"] = to_json(asked.body), "application/json"
        try:
            connection.connect()
        except (socket.gaierror, UnicodeError, ssl.SSLCertVerificationError) as error:  # permanent errors: no retry
            raise StackNotRunning(f"expected MegaFlow's web server at {self.url}, found: {error}") from error
        except OSError as error:
            raise _NeverSent(_away(self.url, error)) from error
        self._tried(lambda: connection.request(asked.method, asked.target, content, headers))
        return self._tried(connection.getresponse)

    def _tried(self, call: Callable[[], Model]) -> Model:
        try:
            return call()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerUnavailable(_away(self.url, error)) from error


def _copied(reply: http.client.HTTPResponse, into: IO[bytes]) -> bytes:
    """Copies the content into the file. Raises: OSError, HTTPException: the content is incomplete."""
    into.seek(0)
    into.truncate()
    shutil.copyfileobj(reply, into)
    if reply.length:
        raise http.client.IncompleteRead(b"", reply.length)
    return b""


class _NeverSent(ServerUnavailable):
    """Raised when no connection could be made, so the request was not sent."""


def refusal(status: int, content: bytes, url: str) -> MegaFlowError:
    """Returns the error that a response names; ServerUnavailable for a passing failure of a proxy or the database."""
    try:
        body = json.loads(content)["error"]
        name, message = str(body["type"]), str(body["message"])
    except (ValueError, KeyError, TypeError):
        status_text = f"HTTP {status}"
        if status in _AGAIN:
            return ServerUnavailable(_away(url, status_text))
        return MegaFlowError(f"expected an answer of MegaFlow's web server at {url}, found {status_text}")
    if name == "DatabaseUnavailable":
        return ServerUnavailable(message)
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, MegaFlowError)):
        return MegaFlowError(message)
    error = kind.__new__(kind)  # some take more than a message
    error.args = (message,)
    return error


def _away(url: str, found: object) -> str:
    return f"expected MegaFlow's web server at {url}, found: {found}; `megaflow up` starts it there"


def _end_when(stop: threading.Event, ended: threading.Event, connection: http.client.HTTPConnection) -> None:
    """Ends a blocking read as soon as `stop` is set."""
    while not ended.is_set():
        if stop.wait(0.1):
            if (open_socket := connection.sock) is not None:
                try:
                    open_socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return
            return


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, datetime) else str(value)
