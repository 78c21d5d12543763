"""Chooses the host for the next tasks of a persistent pool, by where their images are. No I/O.

Only a preference, in two ways that cost no task anything: each task that goes now is sent to one of the hosts with a
free slot; and of one user's tasks that are equal but for their arrival, one whose image is where the slot is may go
first. How many go, and whose they are, is decided before (`policy.admit`) and stays.
Source: Zaharia et al., Delay Scheduling (2010), whose tasks let slots pass for a bounded time; here a slot never waits.
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
"""How many of the first tasks of one turn may go next."""
MOST_OVERTAKEN = 64
"""A task that this many others of its turn have overtaken is overtaken no more."""


class Contender(NamedTuple):
    """A task that may go now. Those of one `turn` are equal but for their arrival: they may change places."""

    identity: Any
    turn: Any
    image: str = ""  # what hosts call it; empty: it needs none


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """Who goes, in order, and to which host (None: any); and how often those who stay were overtaken."""

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
    """As many of each turn as were `chosen`, each for a host with a free slot as long as there is one.

    chosen: in their order; behind: those who come after them, in theirs. free: slots by host, also of those that have
    none. where: the hosts that have an image, or will. overtaken: how often each task was, until now. No task is
    overtaken by more than `most_overtaken`, nor by one who stands `look_ahead` places behind.
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
    """The host that should have an image that none has: the same for every caller, and evenly spread.

    None for the images of several containers: they are of use only where an engine is, and hosts do not say.

    Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates (1998): rendezvous hashing.
    """
    if image.startswith(SEVERAL):
        return None
    return max(hosts, key=lambda host: (_weight(host, image), host), default=None)


def queue_at(queue: str, host: str) -> str:
    """A host's own part of a queue, to which its standing instances listen beside the common one."""
    return f"{queue}.{host}"


@lru_cache(maxsize=65536)
def _weight(host: str, image: str) -> bytes:
    return hashlib.blake2b(f"{host}\0{image}".encode(), digest_size=8).digest()


class _Hosts:
    """Free slots, and which images are where, as they change from choice to choice."""

    def __init__(self, free: Mapping[str, int], where: Mapping[str, Collection[str]]) -> None:
        self._all = sorted(free)
        self._free = Counter({host: slots for host, slots in free.items() if slots > 0})
        self._where = {image: set(hosts) for image, hosts in where.items()}

    def with_image(self, image: str) -> str | None:
        """One with a free slot that has it: the one with most; None when no host has both."""
        return self._freest(self._where.get(image, ())) if image else None

    def at_home(self, image: str) -> str | None:
        """Where an image that no host has should be, when a slot is free there."""
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
    """The tasks of one turn that have not gone, first to last."""

    before: Mapping[Any, int]  # how often each was overtaken until now
    look_ahead: int
    most: int
    queue: deque[Contender] = field(default_factory=deque)
    now: Counter[Any] = field(default_factory=Counter)  # and since

    def next(self, hosts: _Hosts) -> tuple[Contender, str | None]:
        """Who goes, and where: the first whose image is where a slot is; else whose image should be there; else the
        first."""
        reach = self._reach()
        for find in (hosts.with_image, hosts.at_home):
            for place in range(reach):
                if (host := find(self.queue[place].image)) is not None:
                    return self._take(place), host
        return self._take(0), hosts.freest()

    def _reach(self) -> int:
        """How many of the first may go: none behind one that has been overtaken often enough."""
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
