"""Carries traffic out of an environment without a network, and counts it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from app.environments.contract import Forward, Serve
from app.models.spec import Network

log = structlog.get_logger()

_MOST_HOSTS = 500
"""Maximum hosts counted by name; a task may invent any number."""
OTHERS = "(others)"

OpenForward = Callable[[int, Serve], Forward]
"""Signature of an environment's `forward`."""


@dataclass
class Traffic:
    """Counts by host: connections, failed (allowed, but not reached), refused. Safe to share between threads."""

    policy: Network
    _hosts: dict[str, Counter[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def connected(self, host: str) -> None:
        if self._count(host, "connections") == 1:
            log.info("egress.host_reached", policy=self.policy.value, host=host)

    def failed(self, host: str, why: str) -> None:
        if self._count(host, "failed") == 1:
            log.warning("egress.host_unreachable", policy=self.policy.value, host=host, reason=why)

    def refused(self, host: str, why: str) -> None:
        if self._count(host, "refused") == 1:
            log.warning("egress.host_refused", policy=self.policy.value, host=host, reason=why)

    def describe(self) -> dict[str, dict[str, int]]:
        """Returns the counts by host; counts of 0 are left out."""
        with self._lock:
            return {host: dict(counts) for host, counts in self._hosts.items()}

    def _count(self, host: str, name: str) -> int:
        with self._lock:
            if host not in self._hosts and len(self._hosts) >= _MOST_HOSTS:
                host = OTHERS
            counts = self._hosts.setdefault(host, Counter())
            counts[name] += 1
            return counts[name]


class Egress:
    """Open way out of an environment. Its opener closes it; the environment's end also ends it."""

    def __init__(self, forward: Forward, traffic: Traffic, **about: Any) -> None:
        self._forward = forward
        self._traffic = traffic
        self._about = about

    @property
    def port(self) -> int:
        """Port on the environment's loopback."""
        return self._forward.port

    def describe(self) -> dict[str, Any]:
        """Returns policy, what it allows, and counts by `host:port`, as an attempt records it. Also after the end."""
        return {"policy": self._traffic.policy.value, **self._about, "hosts": self._traffic.describe()}

    def close(self) -> None:
        """Ends it, with its connections. Safe to call twice."""
        self._forward.close()
