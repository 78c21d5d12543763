"""The host's image cache simulated: a dataset of 500 images on a disk for 50, in queue order.

    python -m bench.images        (a few seconds; writes results/images.json and images.png)

Policies see the same tasks: ours with the forecast that a host has (the first 2,000 waiting tasks, some seconds old,
nothing of what is submitted later), LRU, FIFO, and Bélády's optimum, which knows every task that will ever come. Sizes
and shared layers are those measured of SWE-bench-like images. Nothing is pulled; `eviction.choose_victims` is the code
that hosts run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")  # no screen here

from matplotlib import pyplot as plt

from app.environments.image_store.eviction import Held, Layer, choose_victims, total_bytes
from app.ledger.upcoming import MOST, in_order
from app.ledger.waiting import Candidate, LineKey
from app.models.spec import Mode
from bench import control_record
from bench.control_record import Part
from bench.record import RESULTS, Row, row

GOAL = 1.10
"""Our pulls to the optimum's."""
MB = 1_000_000
BASE_BYTES, ENV_BYTES, OWN_BYTES = 262 * MB, 454 * MB, 25 * MB
ENVS = 60
OURS, LRU, FIFO, BELADY = "MegaFlow", "LRU", "FIFO", "optimum (Bélády)"
_COLOURS = {OURS: "tab:blue", LRU: "tab:orange", FIFO: "tab:grey", BELADY: "tab:green"}


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
    low: float = 0.8 / 0.9  # of the room: evicting goes on until there, as the settings' marks have it
    stale: int = 20  # tasks started between two looks at the queue
    disorder: float = 0.1  # share of tasks that go before their turn: retries, quotas, classes
    seed: int = 20240607


@dataclass(frozen=True, slots=True)
class Start:
    """One task starts on this host. `forecast`: what it knows of the queue; `in_use`: by tasks that run."""

    key: str
    in_use: frozenset[str]
    forecast: Sequence[str]


# --- The dataset and the queue ----------------------------------------------------------------------------------------


def dataset(world: World) -> dict[str, Held]:
    """Images by key; their layers are shared, or all their own and of one size."""
    dice = random.Random(world.seed)
    if not world.shared:
        size = BASE_BYTES + ENV_BYTES + OWN_BYTES
        return {f"i{n}": _image(f"i{n}", (Layer(f"all-{n}", size),)) for n in range(world.images)}
    base = Layer("base", BASE_BYTES)
    envs = [Layer(f"env-{n}", int(ENV_BYTES * dice.lognormvariate(0, 0.4))) for n in range(ENVS)]
    found = {}
    for n in range(world.images):
        own = Layer(f"own-{n}", int(OWN_BYTES * dice.lognormvariate(0, 0.6)))
        found[f"i{n}"] = _image(f"i{n}", (base, envs[min(int(dice.expovariate(3 / ENVS)), ENVS - 1)], own))
    return found


def _image(key: str, layers: tuple[Layer, ...]) -> Held:
    return Held(key, frozenset((key,)), layers)


class Queue:
    """Runs of several users, submitted while others go on; the dispatcher's own order between them."""

    def __init__(self, world: World, keys: Sequence[str]) -> None:
        self._world = world
        self._dice = random.Random(world.seed + 1)
        self._lines: dict[str, deque[str]] = {f"user-{n}": deque() for n in range(world.users)}
        self._later = sorted(
            (run * 1500 + self._dice.randrange(1200) if run else self._dice.randrange(300), user, run)
            for user in self._lines
            for run in range(world.runs)
        )
        self._keys = list(keys)
        self._held: Counter[str] = Counter()

    def starts(self) -> Iterator[Start]:
        """Every task that starts on this host, in order."""
        running: list[tuple[int, str, str, bool]] = []  # end, user, image, on this host
        forecast: Sequence[str] = ()
        began = 0
        for clock in range(1_000_000):
            self._submit(clock)
            for task in [task for task in running if task[0] <= clock]:
                running.remove(task)
                self._held[task[1]] -= 1
            user = self._next_user()
            if user is None:
                if not running and not self._later:
                    return
                continue
            if len(running) >= self._world.slots * self._world.hosts:
                continue
            if began % self._world.stale == 0:
                forecast = self._forecast()
            began += 1
            key, here = self._take(user), self._dice.randrange(self._world.hosts) == 0
            if here:
                yield Start(key, frozenset(image for _, _, image, ours in running if ours), forecast)
            self._held[user] += 1
            length = self._world.slots * self._world.hosts * self._dice.lognormvariate(0, 0.5)
            running.append((clock + int(length), user, key, here))

    def _submit(self, clock: int) -> None:
        while self._later and self._later[0][0] <= clock:
            _, user, _ = self._later.pop(0)
            replicas = self._dice.choice((1, 4, 8, 16))
            chosen = self._dice.sample(self._keys, min(len(self._keys), self._dice.randint(40, 800) // replicas + 20))
            self._lines[user].extend(key for key in chosen for _ in range(replicas))

    def _next_user(self) -> str | None:
        waiting = [user for user, line in self._lines.items() if line]
        return min(waiting, key=lambda user: (self._held[user], user), default=None)

    def _take(self, user: str) -> str:
        line = self._lines[user]
        ahead = self._dice.randrange(min(40, len(line))) if self._dice.random() < self._world.disorder else 0
        key = line[ahead]
        del line[ahead]
        return key

    def _forecast(self) -> list[str]:
        most = MOST // max(1, sum(bool(line) for line in self._lines.values()))
        heads = {
            # Any value that sorts will do as an id: a UUID for each of millions would be most of the time.
            LineKey(Mode.EPHEMERAL, "standard", user): [Candidate(key, 0, 0) for key in islice(line, most)]
            for user, line in self._lines.items()
        }
        held = {(user, "standard"): count for user, count in self._held.items()}
        weights = dict.fromkeys(self._lines, 1.0)
        return [key for key, _ in in_order(heads, held, weights, fair=True)]


# --- Policies ---------------------------------------------------------------------------------------------------------


@dataclass
class Disk:
    """One host's images under one policy."""

    room_bytes: int
    low_bytes: int
    victims: Callable[[Disk, Start, int, int], list[str]]
    here: OrderedDict[str, Held] = field(default_factory=OrderedDict)  # in the order of arrival
    holders: Counter[str] = field(default_factory=Counter)
    used_bytes: int = 0
    used_at: dict[str, int] = field(default_factory=dict)
    pulls: int = 0
    pulled_bytes: int = 0

    def serve(self, start: Start, image: Held, clock: int) -> None:
        """Have the image, evicting what the policy chooses when the disk is too full for it."""
        self.used_at[start.key] = clock
        if start.key in self.here:
            return
        coming = sum(layer.size_bytes for layer in image.layers if not self.holders[layer.id])
        if self.used_bytes + coming > self.room_bytes:
            for key in self.victims(self, start, clock, self.used_bytes + coming):
                self._remove(key)
        self._add(start.key, image)

    def _add(self, key: str, image: Held) -> None:
        self.pulls += 1
        for layer in image.layers:
            self.holders[layer.id] += 1
            if self.holders[layer.id] == 1:
                self.used_bytes += layer.size_bytes
                self.pulled_bytes += layer.size_bytes
        self.here[key] = image

    def _remove(self, key: str) -> None:
        for layer in self.here.pop(key).layers:
            self.holders[layer.id] -= 1
            if not self.holders[layer.id]:
                self.used_bytes -= layer.size_bytes


def ours(disk: Disk, start: Start, clock: int, wanted_bytes: int) -> list[str]:
    """What a host does: down to the low mark, by the forecast."""
    held = [replace(image, used_at=float(disk.used_at[key])) for key, image in disk.here.items()]
    in_use = start.in_use | {start.key}
    return choose_victims(held, start.forecast, in_use, wanted_bytes - disk.low_bytes)


def in_line(order: Callable[[Disk, str], float]) -> Callable[[Disk, Start, int, int], list[str]]:
    """The smallest by `order` goes first, until the new image fits."""

    def victims(disk: Disk, start: Start, clock: int, wanted_bytes: int) -> list[str]:
        ranked = sorted((key for key in disk.here if key not in start.in_use), key=lambda key: order(disk, key))
        held = dict(disk.here)
        return _until(held, ranked, wanted_bytes - disk.room_bytes)

    return victims


def belady(future: Mapping[str, Sequence[int]]) -> Callable[[Disk, Start, int, int], list[str]]:
    """Of what is here, whatever comes again last goes first; as little as will do."""

    def victims(disk: Disk, start: Start, clock: int, wanted_bytes: int) -> list[str]:
        def again(key: str) -> int:
            times = future[key]
            place = bisect_right(times, clock)
            return times[place] if place < len(times) else 1 << 60

        order = sorted(disk.here, key=again)
        return choose_victims(list(disk.here.values()), order, start.in_use, wanted_bytes - disk.room_bytes)

    return victims


def _until(held: Mapping[str, Held], ranked: Sequence[str], need_bytes: int) -> list[str]:
    holders = Counter(layer.id for image in held.values() for layer in image.layers)
    chosen = []
    for key in ranked:
        if need_bytes <= 0:
            break
        chosen.append(key)
        for layer in held[key].layers:
            holders[layer.id] -= 1
            need_bytes -= 0 if holders[layer.id] else layer.size_bytes
    return chosen


# --- The runs ---------------------------------------------------------------------------------------------------------


def simulate(world: World) -> tuple[dict[str, Disk], dict[str, Any]]:
    """Every policy on the same tasks; their disks at the end, and what is worth knowing of the tasks."""
    images = dataset(world)
    starts = list(Queue(world, list(images)).starts())
    future: defaultdict[str, list[int]] = defaultdict(list)
    for clock, start in enumerate(starts):
        future[start.key].append(clock)
    average = sum(sum(layer.size_bytes for layer in image.layers) for image in images.values()) / len(images)
    room = int(world.room * average)
    policies = {
        BELADY: Disk(room, room, belady(future)),
        OURS: Disk(room, int(room * world.low), ours),
        LRU: Disk(room, room, in_line(lambda disk, key: disk.used_at[key])),
        FIFO: Disk(room, room, in_line(lambda disk, key: 0)),
    }
    curves: dict[str, list[int]] = {name: [] for name in policies}
    for clock, start in enumerate(starts):
        for name, disk in policies.items():
            disk.serve(start, images[start.key], clock)
            if clock % 100 == 0:
                curves[name].append(disk.pulls)
    about = {
        "tasks": len(starts),
        "images asked for": len(future),
        "dataset_bytes": total_bytes(images.values()),
        "room_bytes": room,
        "curves": curves,
    }
    return policies, about


WORLDS = (
    World("images of one size that share nothing", shared=False),
    World("the same queue feeds four hosts", shared=False, hosts=4, runs=6),
    World("base and environment layers shared, disk for 12 unshared", room=12),
)


def measure(world: World) -> Part:
    """Pulls and bytes of each policy, and ours against the optimum."""
    policies, about = simulate(world)
    best = policies[BELADY]
    rows: list[Row] = [
        row("tasks", about["tasks"], "tasks"),
        row("images asked for", about["images asked for"], "images"),
    ]
    for name, disk in policies.items():
        rows.append(row(f"{name}: pulls", disk.pulls, "images"))
        rows.append(row(f"{name}: pulled", disk.pulled_bytes / 1e9, "GB"))
        if name != BELADY:
            goal = GOAL if name == OURS else None
            rows.append(row(f"{name}: pulls to the optimum's", disk.pulls / best.pulls, "x", goal=goal, better="less"))
    return Part(rows, {"world": world, **about, "pulls": {name: disk.pulls for name, disk in policies.items()}})


def main() -> int:
    """Simulate, write, print. The exit code is 0 also when the goal was missed: the file says so."""
    parser = argparse.ArgumentParser(prog="python -m bench.images", description="Simulate the host's image cache.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of images.json and images.png")
    path = parser.parse_args().out / "images.json"
    console = Console(width=None if sys.stdout.isatty() else 140)
    for world in WORLDS:
        begun = time.monotonic()
        part = measure(world)
        control_record.keep(path, world.name, part, busy=0.0, took_s=time.monotonic() - begun)
        table = Table("metric", "value", "unit", "goal", "holds", title=world.name, header_style="bold", pad_edge=False)
        for item in part.rows:
            goal = ("-", "-") if item.goal is None else (f"{item.goal:g}", str(item.holds))
            table.add_row(item.metric, f"{item.value:g}", item.unit, *goal)
        console.print(table)
    draw(control_record.load(path), path.with_suffix(".png"))
    return 0


def draw(kept: Mapping[str, Any], path: Path) -> None:
    """The picture, from what the file holds and nothing else."""
    names = [world.name for world in WORLDS if world.name in kept]
    figure, axes = plt.subplots(1, len(names), figsize=(6 * len(names), 5), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for policy, curve in kept[name]["samples"]["curves"].items():
            axis.plot([100 * n for n in range(len(curve))], curve, label=policy, color=_COLOURS[policy])
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("tasks started on this host")
        axis.set_ylabel("images pulled")
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
