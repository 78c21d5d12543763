"""Defines the IP addresses to which the gateway never connects."""

from __future__ import annotations

import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit, urlunsplit

_METADATA = frozenset(
    map(ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
"""Addresses of cloud metadata services that are not link-local."""
_WITH_IPV4 = tuple(map(IPv6Network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))
"""Forms of IPv6 address whose last 32 bits are an IPv4 address: NAT64, "compatible", and translated ones."""
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")
"""Local NAT64 of a site: the site chooses the position of the IPv4 address inside the IPv6 address."""


def forbidden(address: str) -> str | None:
    """Returns the reason why no model may be called at this IP address; None: calls are allowed.

    An IPv4 address inside an IPv6 address is checked as an IPv4 address.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return "no IP address"
    if isinstance(ip, IPv6Address):
        if ip in _LOCAL_NAT64:
            return "an address of a site's own IPv4 translator"
        ip = _within(ip) or ip
    if ip.is_link_local:
        return "a link-local address"
    if ip in _METADATA:
        return "the address of a cloud's metadata service"
    if ip.is_unspecified or ip.is_multicast or ip == IPv4Address("255.255.255.255"):
        return "no address of one host"
    return None


@lru_cache(1024)
def forbidden_url(url: str) -> str | None:
    """Checks a URL's host like `forbidden`; None for a name, which is checked once resolved. Raises: ValueError."""
    host = urlsplit(url).hostname or ""
    try:
        return forbidden(str(ip_address(host)))
    except ValueError:
        pass
    try:  # 2852039166 and 0xa9.0xfe.43518 are valid addresses too
        return forbidden(socket.inet_ntoa(socket.inet_aton(host)))
    except (OSError, UnicodeEncodeError):
        return None


@lru_cache(1024)
def normal_url(url: str) -> str:
    """Normalizes a base URL for comparing and storing. Raises: ValueError: not a URL."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme.lower(), parts.netloc.lower(), *parts[2:])).rstrip("/")


def _within(address: IPv6Address) -> IPv4Address | None:
    if int(address) > 1 and any(address in form for form in _WITH_IPV4):  # not `::` and `::1`
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
