"""Policy `model-only`: a port inside that leads to the model gateway.

Inside, the endpoint is plain HTTP on the loopback. To an endpoint without TLS, at an address, bytes are passed on
unchanged. To any other, requests are passed on one by one: TLS and the certificate are handled here, outside, and the
Host header names the endpoint, which such servers need.
"""

from __future__ import annotations

import socket
import ssl
from functools import lru_cache
from urllib.parse import urlsplit

import certifi
import h11

from app.environments.networks.egress import Egress, OpenForward, Traffic
from app.environments.networks.http_proxy import Client, ProxyUpstream, RequestProxy, ServerBroken
from app.environments.networks.pump import pump
from app.errors import SpecInvalid
from app.models.hosts import HostInvalid, address_of, canonical
from app.models.spec import Network

MODEL_PORT = 8411
"""Port on the loopback inside."""
CONNECT_S = 15.0
IDLE_S = 3600.0
"""A model may take long before its first byte; the environment's end ends the wait in any case."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_PORTS = {"http": 80, "https": 443}


def upstream_of(url: str) -> ProxyUpstream:
    """Returns the server of a model's URL. Raises: SpecInvalid."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
        host = canonical(f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or "")
        if parts.scheme not in _PORTS or parts.username is not None:
            raise HostInvalid("no http or https, or with a user's name")
    except ValueError as error:
        raise SpecInvalid(f"expected the model's URL as http(s)://host[:port]/path, found {url!r}: {error}.") from None
    return ProxyUpstream(host, port, parts.scheme == "https")


def takes_raw_bytes(upstream: ProxyUpstream) -> bool:
    """Whether bytes are passed on unchanged: no TLS, and no name, which the server's address may share with others."""
    return not upstream.tls and (address_of(upstream.host) is not None or upstream.host == "localhost")


def _connect(upstream: ProxyUpstream) -> socket.socket:
    """Raises: OSError."""
    connection = socket.create_connection((upstream.host, upstream.port), timeout=CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return _verifying().wrap_socket(connection, server_hostname=upstream.host) if upstream.tls else connection
    except BaseException:
        connection.close()
        raise


@lru_cache(maxsize=1)
def _verifying() -> ssl.SSLContext:
    """Uses this host's certificates (OpenSSL reads SSL_CERT_FILE and SSL_CERT_DIR), else certifi's."""
    places = ssl.get_default_verify_paths()
    context = ssl.create_default_context(cafile=None if places.cafile or places.capath else certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


def model_base_url(target_url: str, port: int = MODEL_PORT) -> str:
    """Returns the endpoint's base URL as it is inside: another host, the same path."""
    return f"http://127.0.0.1:{port}{urlsplit(target_url).path}"


def open_model_egress(forward: OpenForward, base_url: str, *, port: int = MODEL_PORT) -> tuple[str, Egress]:
    """Opens the port of the model. Returns its base URL inside, and the egress, which the caller closes.

    port: 0 for any free port, where several environments share a loopback.
    Raises: EnvironmentFailed: the environment has no such ports, or it is taken; SpecInvalid: not a model's URL.
    """
    upstream, traffic = upstream_of(base_url), Traffic(Network.MODEL_ONLY)
    serve = _pump if takes_raw_bytes(upstream) else _proxy
    egress = Egress(forward(port, lambda inside: serve(inside, upstream, traffic)), traffic, target=upstream.name)
    return model_base_url(base_url, egress.port), egress


def _pump(inside: socket.socket, upstream: ProxyUpstream, traffic: Traffic) -> None:
    try:
        outside = _connect(upstream)
    except OSError as error:
        traffic.failed(upstream.name, str(error))
        message = f"network 'model-only': expected an answer of {upstream.name}, found: it cannot be reached: {error}"
        about = {"policy": "model-only", "host": upstream.name}
        Client(inside, idle_s=IDLE_S).refuse(502, message, "host_unreachable", **about)
        return
    with outside:
        traffic.connected(upstream.name)
        pump(inside, outside, idle_s=IDLE_S)


def _proxy(inside: socket.socket, upstream: ProxyUpstream, traffic: Traffic) -> None:
    client = Client(inside, idle_s=IDLE_S)
    requests = RequestProxy(client, traffic, _connect, idle_s=IDLE_S)
    try:
        for request in client.requests():
            if not request.target.startswith(b"/"):  # an address or a tunnel: a server may use it instead of the Host
                client.refuse(400, "network 'model-only': expected a path of the model's endpoint", "bad_request")
                return
            requests.pass_on(request, request.target, upstream)
    except h11.RemoteProtocolError as error:
        client.refuse(error.error_status_hint, f"expected a request in HTTP/1.1, found: {error}", "bad_request")
    except ServerBroken:
        return  # reported and counted
    finally:
        requests.close()
