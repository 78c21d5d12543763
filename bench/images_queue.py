"""The image cache's simulation: what is simulated, its dataset, and the queue that tasks come from."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from app.images.eviction import HeldImage, ImageLayer
from app.ledger.upcoming import MOST, in_order
from app.ledger.waiting import QueueKey, WaitingTask
from app.models.spec import Mode
from app.scheduling.placement import LOOK_AHEAD, Contender, place

MB = 1_000_000
BASE_BYTES, ENV_BYTES, OWN_BYTES = 262 * MB, 454 * MB, 25 * MB
ENVS = 60


@dataclass(frozen=True, slots=True)
class World:
    """What is simulated. `room`: images that fit on the disk, were they of average size and shared nothing."""

    name: str
    images: int = 500
    room: int = 50
    shared: bool = True  # base and environment layers in common
    users: int = 5
    runs: int = 3  # of each user
    slots: int = 16  # tasks at once on this host
    hosts: int = 1  # that take tasks from the same queue
    placed: bool = False  # tasks go where their image is, as far as a slot is free there
    low: float = 0.8 / 0.9  # of the room: evicting goes on until there, as the settings' marks have it
    stale: int = 20  # tasks started between two looks at the queue
    disorder: float = 0.1  # share of tasks that go before their turn: retries, quotas, classes
    seed: int = 20240607


class Task(NamedTuple):
    """One waiting task: its number, its run's, its image."""

    number: int
    run: int
    key: str


@dataclass(frozen=True, slots=True)
class Start:
    """One task starts on a host. `forecast`: what that knows of the queue; `in_use`: by tasks that run there."""

    key: str
    host: int
    in_use: frozenset[str]
    forecast: Sequence[str]


Where = Callable[[str], Collection[str]]
"""The hosts that have an image now."""


def dataset(world: World) -> dict[str, HeldImage]:
    """Images by key; their layers are shared, or all their own and of one size."""
    dice = random.Random(world.seed)
    if not world.shared:
        size = BASE_BYTES + ENV_BYTES + OWN_BYTES
        return {f"i{n}": _image(f"i{n}", (ImageLayer(f"all-{n}", size),)) for n in range(world.images)}
    base = ImageLayer("base", BASE_BYTES)
    envs = [ImageLayer(f"env-{n}", int(ENV_BYTES * dice.lognormvariate(0, 0.4))) for n in range(ENVS)]
    found = {}
    for n in range(world.images):
        own = ImageLayer(f"own-{n}", int(OWN_BYTES * dice.lognormvariate(0, 0.6)))
        found[f"i{n}"] = _image(f"i{n}", (base, envs[min(int(dice.expovariate(3 / ENVS)), ENVS - 1)], own))
    return found


def _image(key: str, layers: tuple[ImageLayer, ...]) -> HeldImage:
    return HeldImage(key, frozenset((key,)), layers)


class Queue:
    """Runs of several users, submitted while others go on; the dispatcher's own order between them."""

    def __init__(self, world: World, keys: Sequence[str], where: Where) -> None:
        self._world = world
        self._where = where
        self._dice = random.Random(world.seed + 1)
        self._people = random.Random(world.seed + 2)  # of their own: what is submitted does not hang on what runs where
        self._lines: dict[str, deque[Task]] = {f"user-{n}": deque() for n in range(world.users)}
        self._later = sorted(
            (run * 1500 + self._people.randrange(1200) if run else self._people.randrange(300), user, run)
            for user in self._lines
            for run in range(world.runs)
        )
        self._keys = list(keys)
        self._held: Counter[str] = Counter()
        self._numbers = count()
        self._overtaken: dict[int, int] = {}

    def starts(self) -> Iterator[Start]:
        """Every task that starts, in order."""
        running: list[tuple[int, str, str, int]] = []  # end, user, image, host
        free = [self._world.slots] * self._world.hosts
        forecast: Sequence[str] = ()
        began = 0
        for clock in range(1_000_000):
            self._submit(clock)
            for task in [task for task in running if task[0] <= clock]:
                running.remove(task)
                self._held[task[1]] -= 1
                free[task[3]] += 1
            user = self._next_user()
            if user is None:
                if not running and not self._later:
                    return
                continue
            if not any(free):
                continue
            if began % (self._world.stale * self._world.hosts) == 0:
                forecast = self._forecast()
            began += 1
            key, host = self._take(user, free)
            yield Start(key, host, frozenset(image for _, _, image, at in running if at == host), forecast)
            self._held[user] += 1
            free[host] -= 1
            length = self._world.slots * self._world.hosts * self._dice.lognormvariate(0, 0.5)
            running.append((clock + int(length), user, key, host))

    def _submit(self, clock: int) -> None:
        while self._later and self._later[0][0] <= clock:
            _, user, run = self._later.pop(0)
            replicas = self._people.choice((1, 4, 8, 16))
            chosen = self._people.sample(
                self._keys, min(len(self._keys), self._people.randint(40, 800) // replicas + 20)
            )
            self._lines[user].extend(Task(next(self._numbers), run, key) for key in chosen for _ in range(replicas))

    def _next_user(self) -> str | None:
        waiting = [user for user, line in self._lines.items() if line]
        return min(waiting, key=lambda user: (self._held[user], user), default=None)

    def _take(self, user: str, free: Sequence[int]) -> tuple[str, int]:
        """Who goes, and to which host: with one host the first, but for the disorder of the world."""
        line = self._lines[user]
        ahead = self._dice.randrange(min(40, len(line))) if self._dice.random() < self._world.disorder else 0
        if self._world.placed:
            return self._placed(user, ahead, free)
        key = line[ahead].key
        del line[ahead]
        takes = [host for host, slots in enumerate(free) for _ in range(slots)]
        return key, self._dice.choice(takes) if self._world.hosts > 1 else 0

    def _placed(self, user: str, ahead: int, free: Sequence[int]) -> tuple[str, int]:
        line = self._lines[user]
        contenders = [Contender(task, (user, task.run), task.key) for task in islice(line, ahead, ahead + LOOK_AHEAD)]
        where = {contender.image: self._where(contender.image) for contender in contenders}
        slots = {str(host): count for host, count in enumerate(free)}
        placement = place(contenders[:1], contenders[1:], slots, where, self._overtaken)
        ((task, host),) = placement.chosen
        self._overtaken.update(placement.overtaken)
        line.remove(task)
        return task.key, int(host or 0)

    def _forecast(self) -> list[str]:
        most = MOST // max(1, sum(bool(line) for line in self._lines.values()))
        heads = {
            # Any value that sorts will do as an id: a UUID for each of millions would be most of the time.
            QueueKey(Mode.EPHEMERAL, "standard", user): [WaitingTask(task.key, 0, 0) for task in islice(line, most)]
            for user, line in self._lines.items()
        }
        held = {(user, "standard"): count for user, count in self._held.items()}
        weights = dict.fromkeys(self._lines, 1.0)
        return list(in_order(heads, held, weights, fair=True))
