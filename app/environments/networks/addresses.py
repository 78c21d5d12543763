"""Opens connections to allowed hosts only, checking the address that a name resolves to.

A name is resolved here and its addresses are checked before a byte is sent. The connection goes to the address that was
checked, so a name that changes in between has no effect.
"""

from __future__ import annotations

import ipaddress
import socket

from app.models.hosts import Address, AllowedHosts, address_of

CONNECT_S = 15.0

_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")  # IPv4 behind a translator (RFC 6052)
_STAND_INS = tuple(
    ipaddress.IPv4Network(text) for text in ("192.0.2.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24")
)
"""Reserved ranges without hosts of their own: not internal. A resolver that gives one for a public name routes it."""
_LOCALHOST = "localhost"


class AddressRefused(Exception):
    """An allowed name resolves only to addresses that no task may reach."""


def connect(host: str, port: int, allowed: AllowedHosts) -> socket.socket:
    """Connects to an allowed, canonical host. Raises: AddressRefused: only private addresses; OSError."""
    refused: list[str] = []
    failure: OSError | None = None
    for address in resolve(host, port):
        if not admissible(address, host, port, allowed):
            refused.append(str(address))
            continue
        try:
            return _connected(address, host, port, allowed)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure
    raise AddressRefused(f"{host} is at {', '.join(refused) or 'no address'}, which is not a public one")


def resolve(host: str, port: int) -> list[Address]:
    """Returns the addresses of a canonical host in the resolver's order. Raises: OSError."""
    literal = address_of(host)
    if literal is not None:
        return [literal]
    name = host if host == _LOCALHOST else f"{host}."  # the dot: no search list is tried
    try:
        entries = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host} cannot be looked up: {error}") from error
    return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0])) for entry in entries))


def admissible(address: Address, host: str, port: int, allowed: AllowedHosts) -> bool:
    """Whether the address is public, or allowed: listed itself, or `localhost` listed by that name."""
    if is_public(address) or allowed.allows(str(address), port):
        return True
    return address.is_loopback and host == _LOCALHOST


def is_public(address: Address) -> bool:
    """Whether it is neither this host, nor its networks, nor a way around. IPv4 in IPv6 counts as the IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = _inner(address)
        if inner is not None:
            return is_public(inner)
        if address.scope_id is not None or address.is_site_local:
            return False
    if any(address in network for network in _STAND_INS):
        return True
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


def _connected(address: Address, host: str, port: int, allowed: AllowedHosts) -> socket.socket:
    connection = socket.create_connection((str(address), port), timeout=CONNECT_S)
    try:
        # A public address may be this host's own, where more ports answer than from outside.
        ourselves = connection.getsockname()[0] == connection.getpeername()[0]
        if ourselves and not address.is_loopback and not allowed.allows(str(address), port):
            raise AddressRefused(f"{host} is at {address}, which is the worker's own host")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection
