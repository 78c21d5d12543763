"""What an outlet is: the one way out of an environment that has no network, with an account of what went through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from app.environments.contract import Forward, Serve
from app.models.spec import Network

log = structlog.get_logger()

_MOST_HOSTS = 500
"""Counted by name; a task may make up as many as it likes."""
OTHERS = "(others)"

OpenForward = Callable[[int, Serve], Forward]
"""An environment's `forward`."""


@dataclass
class Counts:
    """What went to one host."""

    connections: int = 0
    failed: int = 0  # allowed, but could not be reached
    refused: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def describe(self) -> dict[str, int]:
        """Those that are not 0."""
        return {name: count for name, count in vars(self).items() if count}


@dataclass
class Traffic:
    """Counts by host. Safe to share between threads."""

    policy: Network
    _hosts: dict[str, Counts] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def connected(self, host: str) -> None:
        with self._lock:
            counts, first = self._of(host)
            counts.connections += 1
        if first:
            log.info("outlet.host_reached", policy=self.policy.value, host=host)

    def failed(self, host: str, why: str) -> None:
        with self._lock:
            counts, _ = self._of(host)
            counts.failed += 1
            first = counts.failed == 1
        if first:
            log.warning("outlet.host_unreachable", policy=self.policy.value, host=host, reason=why)

    def refused(self, host: str, why: str) -> None:
        with self._lock:
            counts, _ = self._of(host)
            counts.refused += 1
            first = counts.refused == 1
        if first:
            log.warning("outlet.host_refused", policy=self.policy.value, host=host, reason=why)

    def passed(self, host: str, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """sent: by the environment."""
        with self._lock:
            counts, _ = self._of(host)
            counts.sent_bytes += sent_bytes
            counts.received_bytes += received_bytes

    def describe(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return {host: counts.describe() for host, counts in self._hosts.items()}

    def _of(self, host: str) -> tuple[Counts, bool]:
        first = host not in self._hosts and len(self._hosts) < _MOST_HOSTS
        if first:
            self._hosts[host] = Counts()
        return self._hosts.get(host) or self._hosts.setdefault(OTHERS, Counts()), first


class Outlet:
    """An open way out. Whoever opened it closes it; it ends with its environment in any case."""

    def __init__(self, forward: Forward, traffic: Traffic, **about: Any) -> None:
        self._forward = forward
        self._traffic = traffic
        self._about = about

    @property
    def port(self) -> int:
        """Of the environment's loopback."""
        return self._forward.port

    def describe(self) -> dict[str, Any]:
        """Policy, what it allows, counts by `host:port`, as an attempt records it. Answers after the end, too."""
        return {"policy": self._traffic.policy.value, **self._about, "hosts": self._traffic.describe()}

    def close(self) -> None:
        """End it, with the connections there are. Safe to call twice."""
        self._forward.close()
