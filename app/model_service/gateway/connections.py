"""The gateway's connections to engines: each address is checked when it is connected to."""

from __future__ import annotations

import errno
import socket

import aiohttp

from app.models.addresses import forbidden

_KEEP_ALIVE_S = 4.0
"""Many engines close a connection that was idle for 5 s: one of ours must never be the later to notice."""


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for this address, which is the one that is connected to: a name cannot be resolved again in between.

    Raises: OSError: models may not be called there (EACCES).
    """
    family, kind, proto, _, (host, *_) = address
    if (why := forbidden(str(host))) is not None:
        raise OSError(errno.EACCES, f"expected a model server, found {why} ({host}): models are never called there")
    return socket.socket(family, kind, proto)


def http_client(timeout_s: float) -> aiohttp.ClientSession:
    """For engines: no bound of its own on connections, no cookies, no proxies, bytes as they come."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, ttl_dns_cache=60, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, timeout_s), sock_read=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=1 << 18,
        max_line_size=1 << 16,
        max_field_size=1 << 16,
    )
