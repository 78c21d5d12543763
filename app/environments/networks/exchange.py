"""HTTP/1.1 on the way through: requests taken from a client inside, each passed on to a server, answers as they come.

Headers that belong to a connection stay on it; nothing of a body is kept. h11 does the parsing.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import h11
from h11._headers import Headers

CHUNK_BYTES = 64 << 10
HEADERS_S = 60.0
"""For a client to send the head of a request, once it has begun; an idle client may stay longer."""
SEND_S = 60.0
_HEAD_BYTES = 32 << 10
_LEAVE_S = 2.0
_LEAVE_BYTES = 4 << 20

_OF_A_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host"),
    )
)
Count = Callable[[int], None]


class ClientGone(OSError):
    """Nobody is left to answer."""


class ServerBroken(OSError):
    """The server cannot be reached, or did not answer as HTTP asks."""


class Client:
    """A connection from inside, as a server sees it."""

    def __init__(self, inside: socket.socket, *, idle_s: float) -> None:
        self.socket = inside
        self._idle_s = idle_s
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)

    def requests(self) -> Iterator[h11.Request]:
        """One after the other; whoever takes one answers it. Raises: OSError; h11.RemoteProtocolError."""
        while True:
            event = self._next(self._idle_s)
            if not isinstance(event, h11.Request):
                return
            yield event
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    def body(self) -> Iterator[bytes]:
        """Of the request that was taken. Raises: OSError; h11.RemoteProtocolError."""
        while True:
            if self._http.they_are_waiting_for_100_continue:
                self.send(h11.InformationalResponse(status_code=100, headers=[]))
            event = self._next(self._idle_s)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise ClientGone("the client ended in the middle of its request")

    def _next(self, patience_s: float) -> object:
        """The next event. A head that has begun must come to its end in time, however slowly it trickles."""
        until = time.monotonic() + patience_s
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
            self.socket.settimeout(None)  # a slow reader's own affair: it is shut when the environment ends
            self.socket.sendall(data)

    def refuse(self, status: int, reason: str, kind: str, **about: object) -> None:
        """Answer with an error in the manner of model APIs and hang up. `reason` must fit a line."""
        body = json.dumps({"error": {"message": reason, "type": kind, **about}}).encode() + b"\n"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # Many clients show nothing of a refused tunnel but this line.
            line = reason.encode("ascii", "replace")[:400]
            self.send(h11.Response(status_code=status, headers=headers, reason=line))
            self.send(h11.Data(data=body))
            self.send(h11.EndOfMessage())
        leave(self.socket)

    def tunnel(self) -> bytes:
        """Agree to a CONNECT; what the client has sent after it already."""
        self.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        return self._http.trailing_data[0]


class Server:
    """A connection to where requests go, kept for the next one as long as it lasts. Whoever has it closes it."""

    def __init__(self, connected: socket.socket, host_header: str, *, idle_s: float) -> None:
        self.socket = connected
        self._host_header = host_header
        self._idle_s = idle_s
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)

    @property
    def reusable(self) -> bool:
        """Whether another request may go out; a server that has hung up since is found here."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return not _readable(self.socket)

    def pass_on(self, request: h11.Request, target: bytes, client: Client, *, sent: Count, received: Count) -> None:
        """One request and its answer. sent, received: told how many bytes of bodies went out and in.

        Raises: ServerBroken: before anything was answered; ClientGone; OSError: in the middle of an answer.
        """
        self._ask(request, target, client, sent)
        event = self._answer(client)
        while isinstance(event, h11.InformationalResponse):
            event = self._answer(client)
        if not isinstance(event, h11.Response):
            raise ServerBroken("the server ended before it answered")
        _to(client, h11.Response(status_code=event.status_code, headers=kept(event.headers), reason=event.reason))
        while isinstance(event := self._body(client), h11.Data):
            received(len(event.data))
            _to(client, h11.Data(data=event.data))
        _to(client, h11.EndOfMessage())

    def _ask(self, request: h11.Request, target: bytes, client: Client, sent: Count) -> None:
        framing = [(name, value) for name, value in request.headers if name == b"transfer-encoding"]
        headers = [
            (b"Host", self._host_header.encode("ascii")),
            *kept(request.headers, chunked=bool(framing)),
            *framing,
        ]
        self._send(h11.Request(method=request.method, target=target, headers=headers))
        for data in client.body():
            sent(len(data))
            self._send(h11.Data(data=data))
        self._send(h11.EndOfMessage())

    def _send(self, event: h11.Event) -> None:
        try:
            self.socket.settimeout(SEND_S)
            self.socket.sendall(self._http.send(event) or b"")
        except OSError as error:
            raise ServerBroken(f"the server took no more of the request: {error}") from error

    def _answer(self, client: Client) -> object:
        try:
            return self._next(client)
        except ClientGone:
            raise
        except (OSError, h11.RemoteProtocolError) as error:
            raise ServerBroken(f"the server did not answer: {error}") from error

    def _body(self, client: Client) -> object:
        """Data, or the end. Raises: OSError."""
        try:
            return self._next(client)
        except h11.RemoteProtocolError as error:
            raise OSError(f"the answer broke off: {error}") from error

    def _next(self, client: Client) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._wait(client.socket)
            self.socket.settimeout(0)
            with suppress(BlockingIOError, ssl.SSLWantReadError):  # TLS has business of its own
                self._http.receive_data(self.socket.recv(CHUNK_BYTES))
        return event

    def _wait(self, inside: socket.socket) -> None:
        """Until the server says something. Raises: ClientGone; TimeoutError."""
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        poll.register(inside, select.POLLRDHUP)
        found = dict(poll.poll(self._idle_s * 1000))
        if self.socket.fileno() in found:
            return
        if found:
            raise ClientGone("the client went away while it waited")
        raise TimeoutError(f"nothing came for {self._idle_s:.0f} s")

    def close(self) -> None:
        self.socket.close()


def kept(headers: Headers, *, chunked: bool = False) -> list[tuple[bytes, bytes]]:
    """Those that go on: all but the connection's own and those that it names. chunked: then no length is believed."""
    named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    dropped = _OF_A_CONNECTION | named | ({b"content-length"} if chunked else set())
    return [(raw, value) for raw, value in headers.raw_items() if raw.lower() not in dropped]


def leave(found: socket.socket) -> None:
    """End a connection so that what was written last is read: what still comes is taken, for a moment, and dropped."""
    until, taken = time.monotonic() + _LEAVE_S, 0
    with suppress(OSError):
        found.shutdown(socket.SHUT_WR)
        while (rest := until - time.monotonic()) > 0 and taken < _LEAVE_BYTES:
            found.settimeout(rest)
            data = found.recv(CHUNK_BYTES)
            if not data:
                return
            taken += len(data)


def _to(client: Client, event: h11.Event) -> None:
    try:
        client.send(event)
    except OSError as error:
        raise ClientGone(f"the client reads no more: {error}") from error


def _readable(found: socket.socket) -> bool:
    poll = select.poll()
    poll.register(found, select.POLLIN)
    return bool(poll.poll(0))
