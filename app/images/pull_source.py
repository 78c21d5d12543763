"""Records whether an image was present, was pulled, or was built.

Providers return only an image's identity, and some images come through two of them. A caller that needs the source
opens a block around the call. Code that pulls or builds inside it, in the same thread, records it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class PullSource(StrEnum):
    """Sources of a task's images, slowest last: they explain its waiting time. Of several images the slowest counts."""

    HERE = "here"
    PULL = "pull"
    BUILD = "build"


@dataclass
class PullSources:
    """Sources recorded inside a block: the slowest of them."""

    longest: PullSource = PullSource.HERE

    def add(self, how: PullSource) -> None:
        self.longest = max(self.longest, how, key=list(PullSource).index)


_asking: ContextVar[PullSources | None] = ContextVar("image_arrivals", default=None)


@contextmanager
def noted() -> Iterator[PullSources]:
    """Collects the sources of images inside the block."""
    sources = PullSources()
    token = _asking.set(sources)
    try:
        yield sources
    finally:
        _asking.reset(token)


def tell(how: PullSource) -> None:
    """Records the source of a requested image, whether this process got it or waited for another process."""
    if (asking := _asking.get()) is not None:
        asking.add(how)
