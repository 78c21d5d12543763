"""Requests of one client inside, each passed on to the server that it is for; the last server is kept connected."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import h11

from app.environments.networks.egress import Traffic
from app.environments.networks.exchange import Client, Server, ServerBroken


@dataclass(frozen=True)
class Place:
    """Where a request goes."""

    name: str  # `host:port`, as it is counted
    host_header: str
    connect: Callable[[], socket.socket] = field(compare=False)  # Raises: OSError


class Passing:
    """Of one connection from inside."""

    def __init__(self, client: Client, traffic: Traffic, *, idle_s: float) -> None:
        self._client = client
        self._traffic = traffic
        self._idle_s = idle_s
        self._place: Place | None = None
        self._server: Server | None = None

    def pass_on(self, request: h11.Request, target: bytes, place: Place) -> None:
        """One request and its answer, or a 502. Raises: OSError: the connection inside is of no more use."""
        try:
            server = self._server_of(place)
            server.pass_on(
                request,
                target,
                self._client,
                sent=lambda count: self._traffic.passed(place.name, sent_bytes=count),
                received=lambda count: self._traffic.passed(place.name, received_bytes=count),
            )
        except ServerBroken as error:
            self._unreachable(place, error)
            raise

    def _server_of(self, place: Place) -> Server:
        if self._server is not None and self._place == place and self._server.reusable:
            return self._server
        self.close()
        try:
            connected = place.connect()
        except OSError as error:
            raise ServerBroken(f"it cannot be reached: {error}") from error
        self._traffic.connected(place.name)
        self._server, self._place = Server(connected, place.host_header, idle_s=self._idle_s), place
        return self._server

    def _unreachable(self, place: Place, error: OSError) -> None:
        self._traffic.failed(place.name, str(error))
        policy = self._traffic.policy.value
        message = f"network {policy!r}: expected an answer of {place.name}, found: {error}"
        self._client.refuse(502, message, "host_unreachable", policy=policy, host=place.name)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
