"""An HTTP/1.1 proxy that streams requests of a client inside to a server, and the answers back.

Headers that belong to a connection stay on it; nothing of a body is stored. h11 does the parsing.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import h11
from h11._headers import Headers

from app.environments.networks.egress import Traffic
from app.models.hosts import joined

CHUNK_BYTES = 64 << 10
HEADERS_S = 60.0
"""Seconds for a client to send the head of a request, once it has begun; an idle client may stay longer."""
SEND_S = 60.0
_HEAD_BYTES = 32 << 10
_DRAIN_S = 2.0
_DRAIN_BYTES = 4 << 20

_HOP_HEADERS = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host"),
    )
)


class ClientClosed(OSError):
    """The client inside ended the connection."""


class ServerBroken(OSError):
    """The server cannot be reached, or did not answer in HTTP."""


class Client:
    """Connection from inside, from the server's point of view."""

    def __init__(self, inside: socket.socket, *, idle_s: float) -> None:
        self.socket = inside
        self._idle_s = idle_s
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)

    def requests(self) -> Iterator[h11.Request]:
        """Yields requests in order, each to be answered before the next. Raises: OSError; h11.RemoteProtocolError."""
        while True:
            event = self._next()
            if not isinstance(event, h11.Request):
                return
            yield event
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    def body(self) -> Iterator[bytes]:
        """Yields the body of the current request. Raises: OSError; h11.RemoteProtocolError."""
        while True:
            if self._http.they_are_waiting_for_100_continue:
                self.send(h11.InformationalResponse(status_code=100, headers=[]))
            event = self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise ClientClosed("the client ended in the middle of its request")

    def _next(self) -> object:
        """Returns the next event. A head that has begun must be complete in time, however slowly it arrives."""
        until = time.monotonic() + self._idle_s
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.their_state is h11.IDLE and self._http.trailing_data[0]:
                until = min(until, time.monotonic() + HEADERS_S)
            self.socket.settimeout(max(0.01, until - time.monotonic()))
            self._http.receive_data(self.socket.recv(CHUNK_BYTES))
        return event

    def send(self, event: h11.Event) -> None:
        """Raises: OSError."""
        data = self._http.send(event)
        if data:
            self.socket.settimeout(None)  # a slow reader: the environment's end shuts the socket
            self.socket.sendall(data)

    def refuse(self, status: int, reason: str, kind: str, **about: object) -> None:
        """Answers with an error in the format of model APIs and closes the connection. `reason` must fit a line."""
        body = json.dumps({"error": {"message": reason, "type": kind, **about}}).encode() + b"\n"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # Many clients show only this line of a refused tunnel.
            line = reason.encode("ascii", "replace")[:400]
            self.send(h11.Response(status_code=status, headers=headers, reason=line))
            self.send(h11.Data(data=body))
            self.send(h11.EndOfMessage())
        close_gracefully(self.socket)

    def tunnel(self) -> bytes:
        """Accepts a CONNECT. Returns what the client has already sent after it."""
        self.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        return self._http.trailing_data[0]


@dataclass(frozen=True)
class ProxyUpstream:
    """A server that requests go to."""

    host: str
    port: int
    tls: bool = False

    @property
    def name(self) -> str:
        """`host:port`, the name in the counts."""
        return joined(self.host, self.port)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else self.name


class RequestProxy:
    """Passes the requests of one client on to servers; the last server stays connected for the next request."""

    def __init__(
        self, client: Client, traffic: Traffic, connect: Callable[[ProxyUpstream], socket.socket], *, idle_s: float
    ) -> None:
        """connect: raises OSError."""
        self._client = client
        self._traffic = traffic
        self._connect = connect
        self._idle_s = idle_s
        self._upstream: ProxyUpstream | None = None
        self._socket: socket.socket | None = None

    def pass_on(self, request: h11.Request, target: bytes, upstream: ProxyUpstream) -> None:
        """Passes on one request and its answer. Raises: ServerBroken: no answer, reported; ClientClosed; OSError."""
        try:
            server = self._connected(upstream)
            self._send_request(server, request, target, upstream)
            event = self._answer(server)
        except ServerBroken as error:
            self._traffic.failed(upstream.name, str(error))
            policy = self._traffic.policy.value
            message = f"network {policy!r}: expected an answer of {upstream.name}, found: {error}"
            self._client.refuse(502, message, "host_unreachable", policy=policy, host=upstream.name)
            raise
        headers = forwarded_headers(event.headers)
        self._to_client(h11.Response(status_code=event.status_code, headers=headers, reason=event.reason))
        try:
            while isinstance(data := self._next(server), h11.Data):
                self._to_client(h11.Data(data=data.data))
        except h11.RemoteProtocolError as error:
            raise OSError(f"the answer broke off: {error}") from error
        self._to_client(h11.EndOfMessage())

    def _connected(self, upstream: ProxyUpstream) -> socket.socket:
        if self._socket is not None and self._upstream == upstream and self._reusable(self._socket):
            return self._socket
        self.close()
        try:
            self._socket = self._connect(upstream)
        except OSError as error:
            raise ServerBroken(f"it cannot be reached: {error}") from error
        self._traffic.connected(upstream.name)
        self._upstream = upstream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        return self._socket

    def _reusable(self, server: socket.socket) -> bool:
        """Whether another request may be sent; detects a server that has hung up meanwhile."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        poll = select.poll()
        poll.register(server, select.POLLIN)
        return not poll.poll(0)

    def _send_request(
        self, server: socket.socket, request: h11.Request, target: bytes, upstream: ProxyUpstream
    ) -> None:
        framing = [(name, value) for name, value in request.headers if name == b"transfer-encoding"]
        headers = [
            (b"Host", upstream.host_header.encode("ascii")),
            *forwarded_headers(request.headers, chunked=bool(framing)),
            *framing,
        ]
        self._send(server, h11.Request(method=request.method, target=target, headers=headers))
        for data in self._client.body():
            self._send(server, h11.Data(data=data))
        self._send(server, h11.EndOfMessage())

    def _send(self, server: socket.socket, event: h11.Event) -> None:
        try:
            server.settimeout(SEND_S)
            server.sendall(self._http.send(event) or b"")
        except OSError as error:
            raise ServerBroken(f"the server took no more of the request: {error}") from error

    def _answer(self, server: socket.socket) -> h11.Response:
        try:
            while isinstance(event := self._next(server), h11.InformationalResponse):
                pass
        except ClientClosed:
            raise
        except (OSError, h11.RemoteProtocolError) as error:
            raise ServerBroken(f"the server did not answer: {error}") from error
        if not isinstance(event, h11.Response):
            raise ServerBroken("the server ended before it answered")
        return event

    def _next(self, server: socket.socket) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._wait(server)
            server.settimeout(0)
            with suppress(BlockingIOError, ssl.SSLWantReadError):  # TLS has messages of its own
                self._http.receive_data(server.recv(CHUNK_BYTES))
        return event

    def _wait(self, server: socket.socket) -> None:
        """Waits until the server sends something. Raises: ClientClosed; TimeoutError."""
        if isinstance(server, ssl.SSLSocket) and server.pending():
            return
        poll = select.poll()
        poll.register(server, select.POLLIN)
        poll.register(self._client.socket, select.POLLRDHUP)
        ready = dict(poll.poll(self._idle_s * 1000))
        if server.fileno() in ready:
            return
        if ready:
            raise ClientClosed("the client went away while it waited")
        raise TimeoutError(f"nothing came for {self._idle_s:.0f} s")

    def _to_client(self, event: h11.Event) -> None:
        try:
            self._client.send(event)
        except OSError as error:
            raise ClientClosed(f"the client reads no more: {error}") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def forwarded_headers(headers: Headers, *, chunked: bool = False) -> list[tuple[bytes, bytes]]:
    """Returns headers to pass on: all but the connection's own and those it names. chunked: drops Content-Length."""
    named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    dropped = _HOP_HEADERS | named | ({b"content-length"} if chunked else set())
    return [(raw, value) for raw, value in headers.raw_items() if raw.lower() not in dropped]


def close_gracefully(connection: socket.socket) -> None:
    """Ends a connection so that the last bytes written are read: drains input for a moment."""
    until, drained_bytes = time.monotonic() + _DRAIN_S, 0
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while (rest := until - time.monotonic()) > 0 and drained_bytes < _DRAIN_BYTES:
            connection.settimeout(rest)
            data = connection.recv(CHUNK_BYTES)
            if not data:
                return
            drained_bytes += len(data)
