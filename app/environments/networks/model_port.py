"""`model-only`: a port inside that is the model's endpoint.

Inside, the endpoint is plain HTTP on the loopback. To an endpoint without TLS, at an address, bytes are carried as they
are. To any other, requests are passed on one by one: TLS is spoken and the certificate verified out here, and the Host
header names the endpoint, by which such servers tell whom they serve.
"""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import certifi
import h11
import structlog

from app.environments.contract import Serve
from app.environments.networks.egress import OpenForward, Outlet, Traffic
from app.environments.networks.exchange import Client, ServerBroken, leave
from app.environments.networks.proxy_client import Passing, Place
from app.environments.networks.pump import pump
from app.errors import SpecInvalid
from app.models.hosts import HostInvalid, address_of, canonical, joined
from app.models.spec import Network

log = structlog.get_logger()

MODEL_PORT = 8411
"""Of the loopback inside."""
CONNECT_S = 15.0
IDLE_S = 3600.0
"""A model may think for long before its first word; the environment's end cuts it short in any case."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Endpoint:
    """Where a model answers."""

    host: str
    port: int
    tls: bool

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Raises: SpecInvalid."""
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme, 0)
            host = canonical(f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or "")
            if parts.scheme not in _PORTS or parts.username is not None:
                raise HostInvalid("no http or https, or with a user's name")
        except ValueError as error:
            raise SpecInvalid(
                f"expected the model's URL as http(s)://host[:port]/path, found {url!r}: {error}."
            ) from None
        return cls(host, port, parts.scheme == "https")

    @property
    def name(self) -> str:
        return joined(self.host, self.port)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.tls else "http"] else self.name

    @property
    def as_it_is(self) -> bool:
        """Whether it takes bytes as they come: no TLS, and no name by which it might be one of many at its address."""
        return not self.tls and (address_of(self.host) is not None or self.host == "localhost")

    def connect(self) -> socket.socket:
        """Raises: OSError."""
        found = socket.create_connection((self.host, self.port), timeout=CONNECT_S)
        try:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                found.setsockopt(socket.IPPROTO_TCP, option, value)
            return _verifying().wrap_socket(found, server_hostname=self.host) if self.tls else found
        except BaseException:
            found.close()
            raise


@lru_cache(maxsize=1)
def _verifying() -> ssl.SSLContext:
    """Certificates of this host (OpenSSL heeds SSL_CERT_FILE and SSL_CERT_DIR), else those that HTTP clients bring."""
    places = ssl.get_default_verify_paths()
    context = ssl.create_default_context(cafile=None if places.cafile or places.capath else certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


def model_base_url(target_url: str, port: int = MODEL_PORT) -> str:
    """The endpoint's base URL as it is inside: another host, the same path."""
    return f"http://127.0.0.1:{port}{urlsplit(target_url).path}"


def model_outlet(forward: OpenForward, base_url: str, *, port: int = MODEL_PORT) -> tuple[str, Outlet]:
    """Open the port that is the model: its base URL inside, and the outlet, which the caller closes.

    port: 0 for one that is free, where several share a loopback.
    Raises: EnvironmentFailed: the environment has no such ports, or it is taken; SpecInvalid: no URL of a model.
    """
    endpoint, traffic = Endpoint.of(base_url), Traffic(Network.MODEL_ONLY)
    outlet = Outlet(forward(port, _serve(endpoint, traffic)), traffic, target=endpoint.name)
    return model_base_url(base_url, outlet.port), outlet


def relay(target_url: str, traffic: Traffic | None = None) -> Serve:
    """What leads a connection to the model at `target_url`. Raises: SpecInvalid."""
    return _serve(Endpoint.of(target_url), traffic or Traffic(Network.MODEL_ONLY))


def _serve(endpoint: Endpoint, traffic: Traffic) -> Serve:
    serve = _carry if endpoint.as_it_is else _pass_on
    return lambda inside: serve(inside, endpoint, traffic)


def _carry(inside: socket.socket, endpoint: Endpoint, traffic: Traffic) -> None:
    try:
        outside = endpoint.connect()
    except OSError as error:
        traffic.failed(endpoint.name, str(error))
        inside.settimeout(CONNECT_S)
        inside.sendall(_unreachable(endpoint, error))
        leave(inside)
        return
    with outside:
        traffic.connected(endpoint.name)
        pump(
            inside,
            outside,
            idle_s=IDLE_S,
            sent=lambda count: traffic.passed(endpoint.name, sent_bytes=count),
            received=lambda count: traffic.passed(endpoint.name, received_bytes=count),
        )


def _unreachable(endpoint: Endpoint, error: OSError) -> bytes:
    """An HTTP answer: whoever speaks to a model understands it."""
    message = f"network 'model-only': expected an answer of {endpoint.name}, found: it cannot be reached: {error}"
    about = {"message": message, "type": "host_unreachable", "policy": "model-only", "host": endpoint.name}
    body = json.dumps({"error": about}).encode() + b"\n"
    head = f"HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def _pass_on(inside: socket.socket, endpoint: Endpoint, traffic: Traffic) -> None:
    client = Client(inside, idle_s=IDLE_S)
    place = Place(endpoint.name, endpoint.host_header, endpoint.connect)
    passing = Passing(client, traffic, idle_s=IDLE_S)
    try:
        for request in client.requests():
            if not request.target.startswith(b"/"):  # an address or a tunnel: a server may heed it before the Host
                client.refuse(400, "network 'model-only': expected a path of the model's endpoint", "bad_request")
                return
            passing.pass_on(request, request.target, place)
    except h11.RemoteProtocolError as error:
        client.refuse(error.error_status_hint, f"expected a request in HTTP/1.1, found: {error}", "bad_request")
    except ServerBroken:
        return  # told and counted
    finally:
        passing.close()
