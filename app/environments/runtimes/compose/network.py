"""Private networks of a project, with small subnets of our own choosing: an engine's own pools hold about thirty.

Addresses are given by us, too: a container that is started again has the one that it had, and nothing in it changes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from docker.errors import APIError
from docker.types import IPAMConfig, IPAMPool

from app.errors import EnvironmentFailed
from app.host.engine import Engine

RANGE = IPv4Network("10.222.0.0/15")
"""Private, so that no policy of ours takes an address in it for a public one; few networks elsewhere are there."""
SMALLEST = 28
"""Thirteen containers; 8,192 such networks fit."""
_TRIES = 64
_ROUTES = Path("/proc/net/route")


@dataclass(frozen=True, slots=True)
class Net:
    """One network on the engine and who has which address in it."""

    id: str
    name: str
    addresses: dict[str, str]  # by service


def make_network(
    engine: Engine, name: str, services: list[str], labels: Mapping[str, str], *, bridge: str | None
) -> Net:
    """A bridge for these services alone. bridge: its interface on the host, which the packet rules of an open network
    go by. None: it leads to no other network, and the host has no address on it: an engine's `internal` alone leaves
    the host's own addresses in reach, and with them all that listens there.

    Raises: EnvironmentFailed, EngineUnavailable.
    """
    inhibited = {"com.docker.network.bridge.inhibit_ipv4": "true"}
    with engine.named(f"create network {name}", EnvironmentFailed):
        for _ in range(_TRIES):
            subnet = _free_subnet(len(services))
            gateway, *hosts = (str(one) for one in subnet.hosts())
            pool = IPAMPool(subnet=str(subnet), gateway=gateway)
            try:
                made = engine.api.create_network(
                    name,
                    driver="bridge",
                    options=inhibited if bridge is None else {"com.docker.network.bridge.name": bridge},
                    ipam=IPAMConfig(pool_configs=[pool]),
                    internal=bridge is None,
                    labels=dict(labels),
                )
            except APIError as error:
                if "overlap" in str(error).lower():  # somebody has it
                    continue
                raise
            return Net(str(made["Id"]), name, dict(zip(services, hosts, strict=False)))
    raise EnvironmentFailed(
        f"no free subnet of {RANGE} was found for {name} in {_TRIES} tries; expected few networks of ours there: "
        "`docker network prune` removes what nobody uses."
    )


def _free_subnet(services: int) -> IPv4Network:
    """A random one that is large enough and not routed by this host.

    Where all of the range is routed (10.0.0.0/8, say), one that is not routed more closely: ours hides few hosts then.
    """
    prefix = next(one for one in range(SMALLEST, 15, -1) if (1 << (32 - one)) - 3 >= services)
    taken = [one for one in _routed() if one.prefixlen > RANGE.prefixlen]
    for _ in range(_TRIES):
        start = random.randrange(RANGE.num_addresses >> (32 - prefix)) << (32 - prefix)
        subnet = IPv4Network((int(RANGE.network_address) + start, prefix))
        if not any(subnet.overlaps(one) for one in taken):
            return subnet
    raise EnvironmentFailed(f"no subnet of {RANGE} was found that this host does not route elsewhere in {_TRIES} tries")


def _routed() -> list[IPv4Network]:
    """What this host's routes already name in our range; when the engine is elsewhere it tells by itself."""
    try:
        rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
        found = [IPv4Network((_address(row[1]), str(_address(row[7])))) for row in rows]
    except (OSError, ValueError, IndexError):
        return []
    return [one for one in found if one.overlaps(RANGE)]


def _address(digits: str) -> IPv4Address:
    """The kernel writes addresses in its own byte order."""
    return IPv4Address(bytes.fromhex(digits)[::-1])
