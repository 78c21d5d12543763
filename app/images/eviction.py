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
    """One layer of an image. Images that have the same `id` in common share its bytes."""

    id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HeldImage:
    """An image that is on this host. `used_at`: seconds since 1970."""

    id: str
    keys: frozenset[str]  # what tasks call it
    layers: tuple[ImageLayer, ...]
    used_at: float = 0.0
    derived: bool = False  # what set-up commands made of another image: they can make it again


def positions(upcoming: Sequence[str]) -> dict[str, int]:
    """Where in the queue each image is needed first."""
    first: dict[str, int] = {}
    for position, key in enumerate(upcoming):
        first.setdefault(key, position)
    return first


def next_use(image: HeldImage, first: Mapping[str, int]) -> float:
    """The image's first place in the queue; infinite when no task there needs it."""
    return min((first[key] for key in image.keys if key in first), default=inf)


def choose_victims(
    images: Sequence[HeldImage], upcoming: Sequence[str], in_use: Collection[str], need_bytes: int
) -> list[str]:
    """Ids of the images to remove, the first to go first, so that `need_bytes` become free; all that may go when that
    is not enough.

    upcoming: keys of images in the order in which the queue needs them; a key may come again. in_use: ids that stay
    whatever happens. Of images that no task waits for, set-ups go first, then the one that was used longest ago.
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


def freed_bytes(images: Sequence[HeldImage], gone: Collection[str]) -> int:
    """What becomes free when these images go."""
    tally = _FreedSpace(images)
    for image in images:
        if image.id in gone:
            tally.drop(image)
    return tally.freed


def total_bytes(images: Iterable[HeldImage]) -> int:
    """What these images take together: a shared layer counts once."""
    return sum({layer.id: layer.size_bytes for image in images for layer in image.layers}.values())


def _evictable(chosen: Sequence[HeldImage], tally: _FreedSpace, need_bytes: int) -> set[str]:
    """Who may stay after all, the soonest needed first: a later victim may have freed enough alone."""
    spared = set()
    for image in reversed(chosen):
        tally.restore(image)
        if tally.freed >= need_bytes:
            spared.add(image.id)
        else:
            tally.drop(image)
    return spared


class _FreedSpace:
    """How much is free when some images are gone. Cheap to change one by one."""

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
