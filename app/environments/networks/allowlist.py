"""Policy `allowlist`: an HTTP proxy on the task's loopback that reaches the allowed hosts only.

It serves CONNECT (for TLS and any other protocol) and plain requests for `http://` URLs. It runs outside: names are
resolved here, and the task has no resolver and no route.
"""

from __future__ import annotations

import re
import socket

import h11

from app.environments.contract import Serve
from app.environments.networks import addresses
from app.environments.networks.addresses import AddressRefused
from app.environments.networks.egress import Traffic
from app.environments.networks.http_proxy import Client, ProxyUpstream, RequestProxy, ServerBroken
from app.environments.networks.pump import pump
from app.models.hosts import AllowedHosts, HostInvalid, split

IDLE_S = 600.0
"""Seconds without traffic after which a connection is ended."""

_ABSOLUTE = re.compile(rb"http://(?P<authority>[^/?#]*)(?P<rest>[^#]*)(#.*)?", re.IGNORECASE)


class ProxyRefusal(Exception):
    """A refused request: the client gets the reason, it is counted, and the connection ends."""

    def __init__(self, status: int, message: str, kind: str, name: str = "(no host)") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.name = name


def proxy(allowed: AllowedHosts, traffic: Traffic) -> Serve:
    """Returns the handler of a connection to the proxy."""
    return lambda inside: _ProxyConnection(inside, allowed, traffic).serve()


class _ProxyConnection:
    def __init__(self, inside: socket.socket, allowed: AllowedHosts, traffic: Traffic) -> None:
        self._inside = inside
        self._allowed = allowed
        self._traffic = traffic
        self._client = Client(inside, idle_s=IDLE_S)
        self._requests = RequestProxy(self._client, traffic, self._connect, idle_s=IDLE_S)

    def serve(self) -> None:
        try:
            for request in self._client.requests():
                if request.method == b"CONNECT":
                    self._tunnel(request)
                    return
                self._pass_on(request)
        except ProxyRefusal as refused:
            self._traffic.refused(refused.name, str(refused))
            allowed = list(self._allowed.patterns)
            self._client.refuse(refused.status, str(refused), refused.kind, host=refused.name, allowed_hosts=allowed)
        except h11.RemoteProtocolError as error:
            self._client.refuse(error.error_status_hint, f"expected a request to a proxy: {error}", "bad_request")
        except ServerBroken:
            return  # reported and counted
        finally:
            self._requests.close()

    def _tunnel(self, request: h11.Request) -> None:
        for _ in self._client.body():
            raise ProxyRefusal(400, "expected CONNECT without a body", "bad_request")
        upstream = self._upstream(request.target, None)
        try:
            outside = self._connect(upstream)
        except OSError as error:
            self._traffic.failed(upstream.name, str(error))
            message = f"network 'allowlist': {upstream.name} is allowed and cannot be reached: {error}"
            self._client.refuse(502, message, "host_unreachable", host=upstream.name)
            return
        with outside:
            self._traffic.connected(upstream.name)
            outside.sendall(self._client.tunnel())
            pump(self._inside, outside, idle_s=IDLE_S)

    def _pass_on(self, request: h11.Request) -> None:
        match = _ABSOLUTE.fullmatch(request.target)
        if match is None:
            raise ProxyRefusal(
                400,
                "this is an HTTP proxy: expected CONNECT host:port, or the URL of an http:// resource as the target",
                "bad_request",
            )
        rest = match["rest"]
        target = rest if rest.startswith(b"/") else b"/" + rest
        self._requests.pass_on(request, target, self._upstream(match["authority"], 80))

    def _upstream(self, authority: bytes, default_port: int | None) -> ProxyUpstream:
        """Raises: ProxyRefusal: no host, or one that is not allowed."""
        try:
            host, port = split(authority.decode("ascii", "backslashreplace"), default_port)
        except HostInvalid as error:
            raise ProxyRefusal(400, f"expected host:port, found: {error}", "bad_request") from None
        if port is None:
            raise ProxyRefusal(400, f"expected host:port, found {host} without a port", "bad_request")
        upstream = ProxyUpstream(host, port)
        if not self._allowed.allows(host, port):
            raise ProxyRefusal(403, self._not_allowed(upstream), "host_not_allowed", upstream.name)
        return upstream

    def _not_allowed(self, upstream: ProxyUpstream) -> str:
        return (
            f"{upstream.name} is not among the task's allowed_hosts ({', '.join(self._allowed.patterns)});"
            " add it there if the task needs it (a name without a port means ports 80 and 443)"
        )

    def _connect(self, upstream: ProxyUpstream) -> socket.socket:
        try:
            return addresses.connect(upstream.host, upstream.port, self._allowed)
        except AddressRefused as error:
            message = f"network 'allowlist': {error}; list the address itself in allowed_hosts if the task needs it"
            raise ProxyRefusal(403, message, "address_not_allowed", upstream.name) from None
