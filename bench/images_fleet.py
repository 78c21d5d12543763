"""The image cache's simulation: disks, and the policies that decide what leaves them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.images.eviction import HeldImage, choose_victims
from bench.images_queue import Start, Where


@dataclass
class Disk:
    """One host's images under one policy."""

    room_bytes: int
    low_bytes: int
    victims: Callable[[Disk, Start, int, int], list[str]]
    here: OrderedDict[str, HeldImage] = field(default_factory=OrderedDict)  # in the order of arrival
    holders: Counter[str] = field(default_factory=Counter)
    used_bytes: int = 0
    used_at: dict[str, int] = field(default_factory=dict)
    pulls: int = 0
    pulled_bytes: int = 0

    def serve(self, start: Start, image: HeldImage, clock: int) -> None:
        """Have the image, evicting what the policy chooses when the disk is too full for it."""
        self.used_at[start.key] = clock
        if start.key in self.here:
            return
        coming = sum(layer.size_bytes for layer in image.layers if not self.holders[layer.id])
        if self.used_bytes + coming > self.room_bytes:
            for key in self.victims(self, start, clock, self.used_bytes + coming):
                self._remove(key)
        self._add(start.key, image)

    def _add(self, key: str, image: HeldImage) -> None:
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


class Fleet:
    """The disks of all hosts under one policy, given for each."""

    def __init__(self, disks: Sequence[Disk]) -> None:
        self.disks = list(disks)
        self._clocks = [0] * len(self.disks)

    def serve(self, start: Start, image: HeldImage) -> None:
        """Each disk has a clock of its own, which counts its tasks."""
        self.disks[start.host].serve(start, image, self._clocks[start.host])
        self._clocks[start.host] += 1

    def where(self, key: str) -> list[str]:
        """The hosts that have the image."""
        return [str(host) for host, disk in enumerate(self.disks) if key in disk.here]

    @property
    def pulls(self) -> int:
        return sum(disk.pulls for disk in self.disks)

    @property
    def pulled_bytes(self) -> int:
        return sum(disk.pulled_bytes for disk in self.disks)


def ours(disk: Disk, start: Start, clock: int, wanted_bytes: int) -> list[str]:
    """What a host does: down to the low mark, by the forecast."""
    held = [replace(image, used_at=float(disk.used_at[key])) for key, image in disk.here.items()]
    in_use = start.in_use | {start.key}
    return choose_victims(held, start.forecast, in_use, wanted_bytes - disk.low_bytes)


def ours_placed(where: Where) -> Callable[[Disk, Start, int, int], list[str]]:
    """What a host does when tasks are placed by image: what another has as well, it need not keep."""

    def victims(disk: Disk, start: Start, clock: int, wanted_bytes: int) -> list[str]:
        alone = {str(start.host)}
        forecast = [key for key in start.forecast if alone.issuperset(where(key))]
        return ours(disk, replace(start, forecast=forecast), clock, wanted_bytes)

    return victims


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


def _until(held: Mapping[str, HeldImage], ranked: Sequence[str], need_bytes: int) -> list[str]:
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
