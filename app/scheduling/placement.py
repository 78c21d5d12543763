"""Chooses the host for the next tasks of a persistent pool, by the location of their images. No I/O.

This is only a preference and delays no task. Each admitted task is sent to a host with a free slot. Among tasks of one
user that differ only in arrival, a task whose image is on the host may go first. The number of tasks and their users
are decided before (`policy.admit`) and do not change.
Source: Zaharia et al., Delay Scheduling (2010). There tasks skip slots for a limited time; here a slot never waits.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from app.models.spec import SEVERAL

LOOK_AHEAD = 64
"""Number of first tasks of a turn that may go next."""
MOST_OVERTAKEN = 64
"""Number of times a task may be overtaken by others of its turn."""


class Contender(NamedTuple):
    """A task that may go now. Tasks of one `turn` differ only in arrival: they may be exchanged."""

    identity: Any
    turn: Any
    image: str = ""  # the hosts' name of the image; empty: no image needed


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """Chosen tasks in order, with host (None: any); and how often each remaining task was overtaken."""

    chosen: list[tuple[Any, str | None]]
    overtaken: dict[Any, int]


def place(
    chosen: Sequence[Contender],
    behind: Sequence[Contender],
    free: Mapping[str, int],
    where: Mapping[str, Collection[str]],
    overtaken: Mapping[Any, int],
    *,
    look_ahead: int = LOOK_AHEAD,
    most_overtaken: int = MOST_OVERTAKEN,
) -> PlacementChoice:
    """Chooses tasks and hosts: per turn as many tasks as in `chosen`, with a host while free slots remain.

    chosen: in order; behind: the tasks after them, in order. free: slots by host, including hosts with 0. where: hosts
    that have an image or will have it. overtaken: how often each task was overtaken so far. A task is overtaken at most
    `most_overtaken` times, and only by tasks less than `look_ahead` places behind.
    """
    hosts = _Hosts(free, where)
    waiting: defaultdict[Any, _TurnQueue] = defaultdict(lambda: _TurnQueue(overtaken, look_ahead, most_overtaken))
    for contender in (*chosen, *behind):
        waiting[contender.turn].queue.append(contender)
    went = []
    for slot in chosen:
        task, host = waiting[slot.turn].next(hosts)
        hosts.take(host, task.image)
        went.append((task.identity, host))
    left = {identity: count for turn in waiting.values() for identity, count in turn.overtaken().items()}
    return PlacementChoice(went, left)


def home_of(image: str, hosts: Iterable[str]) -> str | None:
    """Returns the host that should fetch an image that no host has: same for every caller, evenly distributed.

    None for the images of several containers: they need a container engine, which hosts do not report.

    Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates (1998): rendezvous hashing.
    """
    if image.startswith(SEVERAL):
        return None
    return max(hosts, key=lambda host: (_weight(host, image), host), default=None)


def queue_at(queue: str, host: str) -> str:
    """Returns the name of a host's own queue; its standing instances consume it and the common queue."""
    return f"{queue}.{host}"


@lru_cache(maxsize=65536)
def _weight(host: str, image: str) -> bytes:
    return hashlib.blake2b(f"{host}\0{image}".encode(), digest_size=8).digest()


class _Hosts:
    """Free slots and locations of images, updated by each choice."""

    def __init__(self, free: Mapping[str, int], where: Mapping[str, Collection[str]]) -> None:
        self._all = sorted(free)
        self._free = Counter({host: slots for host, slots in free.items() if slots > 0})
        self._where = {image: set(hosts) for image, hosts in where.items()}

    def with_image(self, image: str) -> str | None:
        """Returns the host with the image and the most free slots; None: no host has both."""
        return self._freest(self._where.get(image, ())) if image else None

    def at_home(self, image: str) -> str | None:
        """Returns the home of an image that no host has, if a slot is free there."""
        if not image or self._where.get(image):
            return None
        home = home_of(image, self._all)
        return home if home is not None and self._free[home] else None

    def freest(self) -> str | None:
        return self._freest(self._all)

    def take(self, host: str | None, image: str) -> None:
        if host is not None:
            self._free[host] -= 1
            self._where.setdefault(image, set()).add(host)

    def _freest(self, among: Iterable[str]) -> str | None:
        free = [host for host in among if self._free[host] > 0]
        return max(free, key=lambda host: (self._free[host], host), default=None)


@dataclass(slots=True)
class _TurnQueue:
    """Remaining tasks of one turn, first to last."""

    before: Mapping[Any, int]  # how often each task was overtaken in earlier passes
    look_ahead: int
    most: int
    queue: deque[Contender] = field(default_factory=deque)
    now: Counter[Any] = field(default_factory=Counter)  # the same, in this pass

    def next(self, hosts: _Hosts) -> tuple[Contender, str | None]:
        """Returns the next task and its host: the first task whose image is on a host with a free slot; else the first
        whose image should be there; else the first task."""
        reach = self._reach()
        for find in (hosts.with_image, hosts.at_home):
            for place in range(reach):
                if (host := find(self.queue[place].image)) is not None:
                    return self._take(place), host
        return self._take(0), hosts.freest()

    def _reach(self) -> int:
        """Returns how many of the first tasks may go: none behind a task that has reached `most`."""
        reach = min(self.look_ahead, len(self.queue))
        for place in range(reach):
            if self._count(self.queue[place].identity) >= self.most:
                return place + 1
        return reach

    def _count(self, identity: Any) -> int:
        return self.before.get(identity, 0) + self.now[identity]

    def _take(self, place: int) -> Contender:
        for earlier in range(place):
            self.now[self.queue[earlier].identity] += 1
        task = self.queue[place]
        del self.queue[place]
        return task

    def overtaken(self) -> dict[Any, int]:
        return {task.identity: count for task in self.queue if (count := self._count(task.identity))}
