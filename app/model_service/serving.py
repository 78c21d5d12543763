"""Defines the shared parts of MegaFlow's HTTP servers: limits on connections and bodies, requests, error replies."""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import structlog
from starlette.types import ASGIApp, Receive
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server, ServerState

from app.model_service.dialects.reading import parse_json
from app.models.model_calls import CallEnd

log = structlog.get_logger()

HEAD_S = 15.0
"""Seconds from the connection, or the first byte of a later request, to the end of the request's head."""
BODY_S = 60.0
"""Seconds without a byte of a request's body."""
IDLE_MOST = 4096
"""Limit of a peer's connections without a request under way. High, as all tasks of a host may be one peer."""


class ConnectionLimits:
    """Limits of a server, and its connections without a request by peer, oldest first. For one event loop."""

    def __init__(self, head_s: float = HEAD_S, body_s: float = BODY_S, without_request_most: int = IDLE_MOST) -> None:
        self.head_s = head_s
        self.body_s = body_s
        self._most = without_request_most
        self._waiting: dict[str, OrderedDict[BoundedProtocol, None]] = {}

    def without_request(self, protocol: BoundedProtocol, peer: str) -> None:
        """Adds a connection without a request. If there are too many, the one that has waited longest is closed."""
        waiting = self._waiting.setdefault(peer, OrderedDict())
        waiting[protocol] = None
        if len(waiting) > self._most:
            oldest, _ = waiting.popitem(last=False)
            log.warning("server.too_many_connections", peer=peer, most=self._most)
            oldest.transport.close()

    def with_request(self, protocol: BoundedProtocol, peer: str) -> None:
        """Removes a connection that has a request under way, or is closed."""
        waiting = self._waiting.get(peer)
        if waiting is not None:
            waiting.pop(protocol, None)
            if not waiting:
                del self._waiting[peer]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with timeouts. uvicorn itself waits for ever for the first request and for its body."""

    limits: ConnectionLimits

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timer: asyncio.TimerHandle | None = None
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._peer = self.client[0] if self.client else ""
        self.limits.without_request(self, self._peer)
        self._expect_within(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_within(None)
        self.limits.with_request(self, self._peer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self._is_idle:  # empty lines begin no request
            self._expect_within(self.limits.head_s)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_within(self.limits.head_s)

    def on_headers_complete(self) -> None:
        self.limits.with_request(self, self._peer)
        self._expect_within(self.limits.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._expect_within(self.limits.body_s)

    def on_message_complete(self) -> None:
        self._expect_within(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle and not self.transport.is_closing():
            self.limits.without_request(self, self._peer)

    def handle_websocket_upgrade(self) -> None:
        self._expect_within(None)  # a WebSocket may be idle without limit
        super().handle_websocket_upgrade()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_within(self, seconds: float | None) -> None:
        """Closes the connection if nothing comes within this time. None: no limit."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        if self.flow.read_paused:  # by the server: the request's handler has not read all data yet
            self._expect_within(seconds)
        else:
            self.transport.abort()


def bounded(limits: ConnectionLimits | None = None) -> type[BoundedProtocol]:
    """Returns the protocol class of one server (`uvicorn.Config(http=…)`)."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits or ConnectionLimits()})


def listen(
    app: ASGIApp, name: str, *, host: str, port: int, grace_s: int, sockets: bool = False, **options: Any
) -> None:
    """Serves an application until SIGTERM or SIGINT. name: prefix of the log event with the address.

    grace_s: seconds that requests may continue after the signal. sockets: allow WebSockets. options: more of uvicorn's.

    Raises: SystemExit with a message: the address is in use, or not this host's.
    """
    config = Config(
        app,
        host=host,
        port=port,
        http=bounded(),
        ws="websockets-sansio" if sockets else "none",
        ws_max_size=1 << 16,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        **options,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        both = host == "::" and socket.has_dualstack_ipv6()
        bound = socket.create_server((host, port), family=family, backlog=config.backlog, dualstack_ipv6=both)
    except OSError as error:
        problem = f"{host} port {port}: {error.strerror}"
        raise SystemExit(f"{name}: expected an address to listen on; found {problem}; choose another") from error
    address, port = bound.getsockname()[:2]
    log.info(f"{name}.listening", host=address, port=port)
    Server(config).run(sockets=[bound])


async def cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks, and returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class CallRefusal(Exception):
    """A refused call, which gets an HTTP error."""

    status: int
    code: str
    message: str
    end: CallEnd = CallEnd.REFUSED  # in the record
    _: KW_ONLY
    body: bytes | None = None
    """An engine's own error body in the caller's dialect, passed on unchanged."""
    final: bool = True
    """Whether clients must not retry."""
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return self.message


class ClientDisconnected(Exception):
    """The caller closed the connection."""


async def read_body(receive: Receive, headers: Iterable[tuple[bytes, bytes]], most: int) -> bytes:
    """Reads the whole body. Raises: CallRefusal: longer than `most`, of which no more is kept; ClientDisconnected."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > most:
            raise _too_large(int(value), most)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most:
            raise _too_large(size, most)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(found: int, most: int) -> CallRefusal:
    message = f"expected a request of at most {most:,} bytes, found {found:,} or more; shorten the conversation"
    return CallRefusal(413, "request_too_large", message)


def read_request(raw: bytes) -> dict[str, Any]:
    """Parses a request into an object with a model's name, also with NaN or half surrogate pairs.

    Raises: CallRefusal: what was expected and what was found.
    """
    try:
        body = parse_json(raw)
    except ValueError as error:
        problem = f"{str(error)[:200]}, beginning {raw[:60].decode(errors='replace')!r}" if raw else "an empty body"
        raise CallRefusal(400, "invalid_json", f"expected a JSON object, found {problem}") from None
    if not isinstance(body, dict):
        raise CallRefusal(400, "invalid_request", f"expected a JSON object, found {type(body).__name__}")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise CallRefusal(400, "invalid_request", f"expected `model`, the name of one, found {model!r:.60}")
    return body


def model_entry(name: str) -> dict[str, Any]:
    """Returns a model's entry in a list, as OpenAI's and Anthropic's clients read it."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "megaflow"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
