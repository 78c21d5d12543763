"""The host's image cache simulated: a dataset of 500 images on a disk for 50, in queue order.

    python -m bench.images        (half a minute; writes results/images.json and images.png)

Policies see the same tasks: ours with the forecast that a host has (the first 2,000 waiting tasks, some seconds old,
nothing of what is submitted later), LRU, FIFO, and Bélády's optimum, which knows every task that will ever come. Where
several hosts share a queue, whoever has a free slot takes the next task; or tasks are placed where their image is, and
then all policies see the tasks as they were placed by what ours had on its disks. Sizes and shared layers are those
measured of SWE-bench-like images. Nothing is pulled; `eviction.choose_victims` and `placement.place` are the code that
runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")  # no screen here

from matplotlib import pyplot as plt

from app.images.eviction import HeldImage, total_bytes
from bench import control_record
from bench.control_record import Part
from bench.images_fleet import Disk, Fleet, belady, in_line, ours, ours_placed
from bench.images_queue import Queue, Start, World, dataset
from bench.record import RESULTS, Row, row

GOAL = 1.10
"""Our pulls to the optimum's."""
OURS, LRU, FIFO, BELADY = "MegaFlow", "LRU", "FIFO", "optimum (Bélády)"
_COLOURS = {OURS: "tab:blue", LRU: "tab:orange", FIFO: "tab:grey", BELADY: "tab:green"}


def simulate(world: World) -> tuple[dict[str, Fleet], dict[str, Any]]:
    """Every policy on the same tasks; their disks at the end, and what is worth knowing of the tasks."""
    images = dataset(world)
    average = sum(sum(layer.size_bytes for layer in image.layers) for image in images.values()) / len(images)
    room = int(world.room * average)
    hosts = range(world.hosts)
    fleets: dict[str, Fleet] = {}
    evict = ours_placed(lambda key: fleets[OURS].where(key)) if world.placed else ours
    fleets[OURS] = Fleet([Disk(room, int(room * world.low), evict) for _ in hosts])
    curves = {OURS: _Curve(fleets[OURS])}
    starts = []
    for start in Queue(world, list(images), fleets[OURS].where).starts():
        starts.append(start)
        curves[OURS].serve(start, images[start.key])
    future: list[defaultdict[str, list[int]]] = [defaultdict(list) for _ in hosts]
    clocks = [0] * world.hosts
    for start in starts:
        future[start.host][start.key].append(clocks[start.host])
        clocks[start.host] += 1
    fleets[BELADY] = Fleet([Disk(room, room, belady(known)) for known in future])
    fleets[LRU] = Fleet([Disk(room, room, in_line(lambda disk, key: disk.used_at[key])) for _ in hosts])
    fleets[FIFO] = Fleet([Disk(room, room, in_line(lambda disk, key: 0)) for _ in hosts])
    for name in (BELADY, LRU, FIFO):
        curves[name] = _Curve(fleets[name])
        for start in starts:
            curves[name].serve(start, images[start.key])
    about = {
        "tasks": len(starts),
        "images asked for": len({start.key for start in starts}),
        "dataset_bytes": total_bytes(images.values()),
        "room_bytes": room,
        "curves": {name: curves[name].pulls for name in _COLOURS},
    }
    return {name: fleets[name] for name in (BELADY, OURS, LRU, FIFO)}, about


class _Curve:
    """A fleet at work, and its pulls at every hundredth task."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._served = 0
        self.pulls: list[int] = []

    def serve(self, start: Start, image: HeldImage) -> None:
        self._fleet.serve(start, image)
        if self._served % 100 == 0:
            self.pulls.append(self._fleet.pulls)
        self._served += 1


FOUR = World("the same queue feeds four hosts", shared=False, hosts=4, runs=6)
WORLDS = (
    World("images of one size that share nothing", shared=False),
    FOUR,
    replace(FOUR, name="four hosts, tasks placed by image", placed=True),
    World("base and environment layers shared, disk for 12 unshared", room=12),
)


def measure(world: World) -> Part:
    """Pulls and bytes of each policy, and ours against the optimum."""
    fleets, about = simulate(world)
    best = fleets[BELADY]
    rows: list[Row] = [
        row("tasks", about["tasks"], "tasks"),
        row("images asked for", about["images asked for"], "images"),
    ]
    for name, fleet in fleets.items():
        rows.append(row(f"{name}: pulls", fleet.pulls, "images"))
        rows.append(row(f"{name}: pulled", fleet.pulled_bytes / 1e9, "GB"))
        if name != BELADY:
            goal = GOAL if name == OURS else None
            rows.append(row(f"{name}: pulls to the optimum's", fleet.pulls / best.pulls, "x", goal=goal, better="less"))
    if world.placed:
        anywhere, _ = simulate(replace(world, placed=False))
        for name in (OURS, BELADY):
            ratio = fleets[OURS].pulls / anywhere[name].pulls
            rows.append(row(f"{OURS}: pulls to {name}'s without placement", ratio, "x"))
    return Part(rows, {"world": world, **about, "pulls": {name: fleet.pulls for name, fleet in fleets.items()}})


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
        axis.set_xlabel("tasks started")
        axis.set_ylabel("images pulled")
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
