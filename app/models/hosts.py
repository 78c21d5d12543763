"""Checks names of hosts that a task may reach.

Different spellings of a host are equal (case, trailing dot, IDNA, ways to write an address). Spellings that resolvers
may read differently, such as `127.1` or `0x7f000001`, are refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

import idna

from app.errors import SpecInvalid

DEFAULT_PORTS = (80, 443)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AUTHORITY = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*)(:(?P<port>[0-9]{1,5}))?")


class HostInvalid(ValueError):
    """Not a host, or not `host:port`."""


def canonical(host: str) -> str:
    """Returns the canonical spelling of a name or address; IPv6 without brackets. Raises: HostInvalid."""
    if host.startswith("[") and host.endswith("]"):
        return str(_plain(_ipv6(host[1:-1])))
    name = host.removesuffix(".").lower()
    if not name.isascii():
        name = _ascii(name)
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return str(_ipv4(name))
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise HostInvalid(f"{host!r} is no name of a host")
    return name


def _ascii(name: str) -> str:
    try:
        return idna.encode(name, uts46=True).decode("ascii").lower().removesuffix(".")
    except (idna.IDNAError, UnicodeError) as error:
        raise HostInvalid(f"{name!r} is no name of a host: {error}") from error


def _ipv4(text: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError as error:
        raise HostInvalid(f"{text!r} is no address: expected four numbers such as 192.0.2.1") from error


def _ipv6(text: str) -> ipaddress.IPv6Address:
    try:
        if "%" in text:
            raise ValueError("a zone means something on one host only")
        return ipaddress.IPv6Address(text)
    except ValueError as error:
        raise HostInvalid(f"{text!r} is no IPv6 address: {error}") from error


def _plain(address: ipaddress.IPv6Address) -> Address:
    """Converts an IPv4-mapped IPv6 address to IPv4: the kernel connects to it by IPv4."""
    return address.ipv4_mapped or address


def split(authority: str, default_port: int | None = None) -> tuple[str, int | None]:
    """Splits `host`, `host:port` or `[address]:port`; the host becomes canonical. Raises: HostInvalid."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        raise HostInvalid(f"expected `host` or `host:port`, found {authority!r}")
    port = default_port if match["port"] is None else int(match["port"])
    if port is not None and not 0 < port < 1 << 16:
        raise HostInvalid(f"expected a port from 1 to 65535, found {port} in {authority!r}")
    return canonical(match["host"]), port


def joined(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(host: str) -> Address | None:
    """Returns the address of a canonical host; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of a task's allowed hosts."""

    host: str  # canonical
    below: bool  # True: its subdomains, not the host itself
    port: int | None  # None: the ports of HTTP and HTTPS

    def allows(self, host: str, port: int) -> bool:
        if port != self.port if self.port is not None else port not in DEFAULT_PORTS:
            return False
        return host.endswith(f".{self.host}") and address_of(host) is None if self.below else host == self.host


class AllowedHosts:
    """Hosts that a task may reach."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """patterns: `name`, `*.name`, an address, each with an optional `:port`. Raises: SpecInvalid."""
        self.patterns = tuple(patterns)
        self._rules = [_rule(pattern) for pattern in self.patterns]

    def allows(self, host: str, port: int) -> bool:
        """Whether the task may reach this host and port. host: canonical."""
        return any(rule.allows(host, port) for rule in self._rules)


def _rule(pattern: str) -> Rule:
    below = pattern.startswith("*.")
    try:
        host, port = split(pattern.removeprefix("*."))
    except HostInvalid as error:
        raise SpecInvalid(
            f"allowed_hosts: expected `name`, `*.name`, an address, or one of these with `:port`, found {pattern!r}:"
            f" {error}. For all hosts there is the network `open`."
        ) from error
    if below and address_of(host) is not None:
        raise SpecInvalid(f"allowed_hosts: expected a name after `*.`, found {pattern!r}.")
    return Rule(host, below, port)
