"""Says whether an image was here, was pulled, or was built.

Providers answer with an image's identity alone, and some images come through two of them. A caller that wants to know
opens a block around the call; code that pulls or builds inside it, in the same thread, notes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum


class PullSource(StrEnum):
    """What the time until an image was there went into; of several images of one task, the longest way."""

    HERE = "here"
    PULL = "pull"
    BUILD = "build"


class PullSources:
    """What was told inside a block."""

    def __init__(self) -> None:
        self._noted: set[PullSource] = set()

    def add(self, how: PullSource) -> None:
        self._noted.add(how)

    @property
    def longest(self) -> PullSource:
        return max({PullSource.HERE, *self._noted}, key=list(PullSource).index)


_asking: ContextVar[PullSources | None] = ContextVar("image_arrivals", default=None)


@contextmanager
def noted() -> Iterator[PullSources]:
    """What is told of images inside the block."""
    found = PullSources()
    token = _asking.set(found)
    try:
        yield found
    finally:
        _asking.reset(token)


def tell(how: PullSource) -> None:
    """An image that was asked for came so, by our doing or while we waited for another's."""
    if (asking := _asking.get()) is not None:
        asking.add(how)
