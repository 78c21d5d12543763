"""Waiting for what another thread, process or machine does in its own time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LONGEST_WAIT_S = 60.0
"""Enough on a slow machine that does other things besides; who waits in vain waits this long."""


def eventually(found: Callable[[], Any], what: str = "what was waited for", *, within_s: float = LONGEST_WAIT_S) -> Any:
    """What `found` gives as soon as that is true; it is called ten times a second or more. Fails when it stays untrue.

    within_s: less than after what time something else (a sweeper, a lease, a default) would make it true as well.
    """
    give_up, pause_s = time.monotonic() + within_s, 0.01
    while not (value := found()):
        assert time.monotonic() < give_up, f"expected {what} within {within_s:.0f} s; it did not happen"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 0.1)  # what takes long needs the processor for itself
    return value


@contextmanager
def in_background(run: Callable[[threading.Event], object]) -> Iterator[None]:
    """It runs in a thread for the length of the block, whose end the event tells it."""
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()
