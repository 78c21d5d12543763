"""IP addresses to which the gateway never connects."""

from __future__ import annotations

import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit, urlunsplit

_METADATA = frozenset(
    map(ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
"""Metadata services of clouds that are not link-local."""
_WITH_IPV4 = tuple(map(IPv6Network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))
"""Forms of IPv6 address whose last 32 bits are an IPv4 address: NAT64, "compatible", and translated ones."""
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")
"""A site's own translator: where in the address it expects the IPv4 address is the site's choice."""


def forbidden(address: str) -> str | None:
    """What makes this IP address one that no model may be called at; None: nothing does.

    An IPv4 address inside an IPv6 address counts as itself.
    """
    try:
        found = ip_address(address)
    except ValueError:
        return "no IP address"
    if isinstance(found, IPv6Address):
        if found in _LOCAL_NAT64:
            return "an address of a site's own IPv4 translator"
        found = _within(found) or found
    if found.is_link_local:
        return "a link-local address"
    if found in _METADATA:
        return "the address of a cloud's metadata service"
    if found.is_unspecified or found.is_multicast or found == IPv4Address("255.255.255.255"):
        return "no address of one host"
    return None


@lru_cache(1024)
def forbidden_url(url: str) -> str | None:
    """The same for a URL's host; None also for a name, which is checked when it is resolved. Raises: ValueError."""
    host = urlsplit(url).hostname or ""
    try:
        return forbidden(str(ip_address(host)))
    except ValueError:
        pass
    try:  # 2852039166 and 0xa9.0xfe.43518 are addresses, too
        return forbidden(socket.inet_ntoa(socket.inet_aton(host)))
    except (OSError, UnicodeEncodeError):
        return None


@lru_cache(1024)
def normal_url(url: str) -> str:
    """A base URL in the one spelling by which it is compared and kept. Raises: ValueError: it is none."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme.lower(), parts.netloc.lower(), *parts[2:])).rstrip("/")


def _within(address: IPv6Address) -> IPv4Address | None:
    if int(address) > 1 and any(address in form for form in _WITH_IPV4):  # not `::` and `::1`
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
