"""Describes a host's images for `megaflow images`: size, tasks that need them, order of eviction."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import NamedTuple

from app.images.cache import View
from app.images.eviction import freed_bytes
from app.images.image_index import Here

_ALL = 1 << 62
"""More bytes than any disk has, to choose everything that may be evicted."""


class ImageDemand(NamedTuple):
    """A place in the queue (0: an attempt has the image now) and how many tasks need it."""

    position: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Line:
    """An image on this host. `own_bytes`: bytes that removing it alone would free."""

    image: str
    id: str
    size_bytes: int
    own_bytes: int
    used_at: datetime | None
    containers: int
    needed_at: int | None  # place in the queue; None: no task waits for it
    waiting: int  # tasks that need it, in the part of the queue that was read
    goes: int | None  # place in the order of eviction; None: it stays
    stays: str | None  # why it is not evicted automatically


def lines(view: View, wanted: Mapping[str, ImageDemand]) -> list[Line]:
    """Lists all images, the soonest needed first and the first to evict last."""
    order = {image_id: place for place, image_id in enumerate(view.victims(_ALL, time.time()), start=1)}
    items = [_line(view, image, wanted, order.get(image.id)) for image in view.images]
    return sorted(items, key=lambda line: (inf if line.needed_at is None else line.needed_at, -(line.goes or _ALL)))


def _line(view: View, image: Here, wanted: Mapping[str, ImageDemand], goes: int | None) -> Line:
    needs = [wanted[key] for key in image.held.keys if key in wanted]
    return Line(
        image=image.names[0] if image.names else "<unnamed>",
        id=image.id.removeprefix("sha256:")[:12],
        size_bytes=image.size_bytes,
        own_bytes=freed_bytes([other.held for other in view.images], {image.id}),
        used_at=datetime.fromtimestamp(image.held.used_at, UTC) if image.held.used_at else None,
        containers=image.containers,
        needed_at=min((need.position for need in needs), default=None),
        waiting=sum(need.tasks for need in needs),
        goes=goes,
        stays=None if goes is not None else _why_it_stays(image),
    )


def _why_it_stays(image: Here) -> str:
    if image.containers:
        return "in use"
    if image.pinned:
        return "base"
    return "just used" if image.ours else "not ours"
