"""Which host makes which environment ahead where several could run the task. Pure, so that a simulator can run it.

Every host divides the same forecast and makes its own part: nobody is asked. What is dealt out is the same as long as
its task waits: it goes by what the environment is, not by its place in the queue, so nothing is made here and thrown
away because somebody at the head has gone.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple


class Needed(NamedTuple):
    """An environment that a task will need."""

    line: Any  # what decides which hosts may run the task
    kin: str  # the same of those that could stand in for each other
    image: str  # what hosts call it
    host: str | None = None  # where the task is, or goes; None: not known yet


def divide(
    needs: Iterable[Needed], serving: Mapping[Any, Mapping[str, int]], where: Mapping[str, Collection[str]]
) -> list[str | None]:
    """For each, the host that is to make it; None: nobody serves its line.

    serving: by line, the hosts, and how many tasks each takes at once. where: the hosts that have an image; of those
    that serve, one that has it is preferred. Of one kin and line each host gets as many as goes with its slots.

    Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates (1998), for the first of a kin.
    """
    dealt: defaultdict[tuple[Any, str], Counter[str]] = defaultdict(Counter)
    found = []
    for need in needs:
        host = need.host
        if host is None and (slots := _candidates(need, serving, where)):
            so_far = dealt[need.line, need.kin]
            host = _next(slots, so_far, need.kin)
            so_far[host] += 1
        found.append(host)
    return found


def _next(slots: Mapping[str, int], dealt: Mapping[str, int], kin: str) -> str:
    """As if each host came in turn, as often as it has slots, from a place of its own in the first round."""
    return min(slots, key=lambda host: ((dealt[host] + _draw(host, kin)) / slots[host], host))


def _candidates(
    need: Needed, serving: Mapping[Any, Mapping[str, int]], where: Mapping[str, Collection[str]]
) -> Mapping[str, int]:
    having = where.get(need.image, ())
    hosts = {host: slots for host, slots in serving.get(need.line, {}).items() if slots > 0}
    return {host: slots for host, slots in hosts.items() if host in having} or hosts


@lru_cache(maxsize=8192)
def _draw(host: str, kin: str) -> float:
    """From 0 up to 1: as if by chance, and the same for whoever asks."""
    digest = hashlib.blake2b(f"{host}\0{kin}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
