"""Ends a command cleanly when it gets a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending_in_order(*numbers: signal.Signals) -> Iterator[None]:
    """Makes these signals (default: SIGTERM) raise SystemExit in the block, once: a second one cannot cut the clean-up.

    The exit code is 128 plus the signal's number, as a shell's. Works in the main thread only.
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


@contextmanager
def interrupt_sets(stop: threading.Event) -> Iterator[None]:
    """Makes the first SIGINT in the block set `stop`, as an exception could get lost, and the second one raise."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=stop.set, daemon=True).start()  # this thread may hold the event's lock

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ignore(*numbers: signal.Signals) -> None:
    """Makes this process ignore these signals from now on. Programs that it starts do not ignore them."""
    for number in numbers:
        signal.signal(number, lambda *_: None)
