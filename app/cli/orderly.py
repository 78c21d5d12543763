"""Ends a command in order when it is told to end, so that it cleans up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending_in_order(*numbers: signal.Signals) -> Iterator[None]:
    """These signals, or SIGTERM, raise SystemExit in the block, once: what cleans up is not cut short by a second one.

    The exit code is that of a shell. In the main thread alone.
    """
    numbers = numbers or (signal.SIGTERM,)

    def leave(number: int, _: FrameType | None) -> None:
        ignore(*numbers)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore(*numbers: signal.Signals) -> None:
    """From now on these signals do not end this process. Programs that it starts are not meant."""
    for number in numbers:
        signal.signal(number, lambda *_: None)
