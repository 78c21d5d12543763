"""Chooses which images to evict: those that the queue needs last. No I/O.

Source: Bélády, A study of replacement algorithms for a virtual-storage computer (1966).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """A layer of an image. Images that have a layer with the same `id` share its bytes."""

    id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HeldImage:
    """An image that is on this host. `used_at`: seconds since 1970."""

    id: str
    keys: frozenset[str]  # names by which tasks refer to it
    layers: tuple[ImageLayer, ...]
    used_at: float = 0.0
    derived: bool = False  # result of set-up commands, which can make it again


def positions(upcoming: Sequence[str]) -> dict[str, int]:
    """Returns by key the first position in the queue at which the image is needed."""
    first: dict[str, int] = {}
    for position, key in enumerate(upcoming):
        first.setdefault(key, position)
    return first


def next_use(image: HeldImage, first: Mapping[str, int]) -> float:
    """Returns the image's first position in the queue; infinite when no task there needs it."""
    return min((first[key] for key in image.keys if key in first), default=inf)


def choose_victims(
    images: Sequence[HeldImage], upcoming: Sequence[str], in_use: Collection[str], need_bytes: int
) -> list[str]:
    """Returns the ids of images to remove, in this order, so that `need_bytes` become free; all removable images if
    that is not enough.

    upcoming: keys of images in the order in which the queue needs them; a key may repeat. in_use: ids that always stay.
    Of images that no task waits for, set-ups are removed first, then the least recently used one.
    Every victim is needed: without any of them, less than `need_bytes` would become free. A layer is freed with
    its last image.
    """
    if need_bytes <= 0:
        return []
    first = positions(upcoming)
    order = sorted(
        (image for image in images if image.id not in in_use),
        key=lambda image: (-next_use(image, first), not image.derived, image.used_at, image.id),
    )
    tally = _FreedSpace(images)
    chosen: list[HeldImage] = []
    for image in order:
        if tally.freed >= need_bytes:
            break
        tally.drop(image)
        chosen.append(image)
    spared = _evictable(chosen, tally, need_bytes) if tally.freed >= need_bytes else set()
    return [image.id for image in chosen if image.id not in spared]


def total_bytes(images: Iterable[HeldImage]) -> int:
    """Returns the bytes of these images together; a shared layer counts once."""
    return sum({layer.id: layer.size_bytes for image in images for layer in image.layers}.values())


def _evictable(chosen: Sequence[HeldImage], tally: _FreedSpace, need_bytes: int) -> set[str]:
    """Returns the ids that may stay after all, soonest needed first: a later victim may have freed enough alone."""
    spared = set()
    for image in reversed(chosen):
        tally.restore(image)
        if tally.freed >= need_bytes:
            spared.add(image.id)
        else:
            tally.drop(image)
    return spared


class _FreedSpace:
    """Counts the bytes that are free when some images are removed. Cheap to change image by image."""

    def __init__(self, images: Sequence[HeldImage]) -> None:
        self._holders = Counter(layer_id for image in images for layer_id in {layer.id for layer in image.layers})
        self.freed = 0

    def drop(self, image: HeldImage) -> None:
        for layer in {layer.id: layer for layer in image.layers}.values():
            self._holders[layer.id] -= 1
            if not self._holders[layer.id]:
                self.freed += layer.size_bytes

    def restore(self, image: HeldImage) -> None:
        for layer in {layer.id: layer for layer in image.layers}.values():
            if not self._holders[layer.id]:
                self.freed -= layer.size_bytes
            self._holders[layer.id] += 1
