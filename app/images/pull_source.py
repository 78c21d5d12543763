"""How an image came to whoever asked for it: it was here, was pulled, or was built.

Providers answer with an image's identity alone, and some images come through two of them. Whoever wants to know how
opens a block around the question; whoever pulls or builds inside it, in the same thread, tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum


class Arrival(StrEnum):
    """What the time until an image was there went into; of several images of one task, the longest way."""

    HERE = "here"
    PULL = "pull"
    BUILD = "build"


class Arrivals:
    """What was told inside a block."""

    def __init__(self) -> None:
        self._told: set[Arrival] = set()

    def add(self, how: Arrival) -> None:
        self._told.add(how)

    @property
    def longest(self) -> Arrival:
        return max({Arrival.HERE, *self._told}, key=list(Arrival).index)


_asking: ContextVar[Arrivals | None] = ContextVar("image_arrivals", default=None)


@contextmanager
def noted() -> Iterator[Arrivals]:
    """What is told of images inside the block."""
    found = Arrivals()
    token = _asking.set(found)
    try:
        yield found
    finally:
        _asking.reset(token)


def tell(how: Arrival) -> None:
    """An image that was asked for came so, by our doing or while we waited for another's."""
    if (asking := _asking.get()) is not None:
        asking.add(how)
