"""How our HTTP servers bound connections that send no request: a time for a request's head, and a number per peer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

log = structlog.get_logger()

HEAD_S = 15.0
"""From the connection, or the first byte of a later request, to the end of the request's head."""
BODY_S = 60.0
"""Without a byte of a request's body."""
WITHOUT_REQUEST_MOST = 4096
"""Connections of one peer without a request under way. All tasks of a host may be one peer: many are well-behaved."""


class Bounds:
    """What a server allows, and the connections without a request by peer, oldest first. For one event loop."""

    def __init__(
        self, head_s: float = HEAD_S, body_s: float = BODY_S, without_request_most: int = WITHOUT_REQUEST_MOST
    ) -> None:
        self.head_s = head_s
        self.body_s = body_s
        self._most = without_request_most
        self._waiting: dict[str, OrderedDict[BoundedProtocol, None]] = {}

    def waits(self, protocol: BoundedProtocol, peer: str) -> None:
        """It has no request under way. Of too many, the one that has waited longest is closed."""
        waiting = self._waiting.setdefault(peer, OrderedDict())
        waiting[protocol] = None
        if len(waiting) > self._most:
            oldest, _ = waiting.popitem(last=False)
            log.warning("server.too_many_connections", peer=peer, most=self._most)
            oldest.transport.close()

    def works(self, protocol: BoundedProtocol, peer: str) -> None:
        """It has a request under way, or is gone."""
        waiting = self._waiting.get(peer)
        if waiting is not None:
            waiting.pop(protocol, None)
            if not waiting:
                del self._waiting[peer]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds. uvicorn itself waits for ever for the first request and for its body."""

    bounds: Bounds

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
        self.bounds.waits(self, self._peer)
        self._within(self.bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._within(None)
        self.bounds.works(self, self._peer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self._is_idle:  # what comes may be empty lines, which begin no request
            self._within(self.bounds.head_s)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._within(self.bounds.head_s)

    def on_headers_complete(self) -> None:
        self.bounds.works(self, self._peer)
        self._within(self.bounds.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._within(self.bounds.body_s)

    def on_message_complete(self) -> None:
        self._within(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle and not self.transport.is_closing():
            self.bounds.waits(self, self._peer)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _within(self, seconds: float | None) -> None:
        """Something has to come within this time, or the connection is closed; None: nothing has to."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_late, seconds)

    def _too_late(self, seconds: float) -> None:
        if self.flow.read_paused:  # by us: more has come than the request's handler took so far
            self._within(seconds)
        else:
            self.transport.abort()


def bounded(bounds: Bounds | None = None) -> type[BoundedProtocol]:
    """The protocol for one server (`uvicorn.Config(http=…)`)."""
    return type("BoundedProtocol", (BoundedProtocol,), {"bounds": bounds or Bounds()})
