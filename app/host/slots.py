"""Limits how many starts, builds and pulls run at a time on this host.

A worker uses a semaphore that the ledger keeps for all hosts. Without one, file locks limit the processes of this host;
the kernel frees them when their holder ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

_RETRY_S = 0.02


class Semaphore(Protocol):
    """Limits how many holders do something at the same time."""

    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> AbstractContextManager[None]:
        """Waits for a slot of the named limit and holds it for the block.

        `limit` is `KIND:SUBJECT`, e.g. `environment_starts:HOST`. `capacity` is the number of slots unless another
        was set; None: no limit. Do not nest it in itself: two blocks would wait for each other's slot.

        Raises: TimeoutError: no slot was free within `timeout_s`, or the wait was stopped. Any other error is a fault
        of the infrastructure, never of the task.
        """
        ...


class HostSemaphore:
    """Semaphore of a process without a ledger: file locks under `folder`, for this host only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> Iterator[None]:
        if capacity is None:
            yield
            return
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", limit)
        with _slot(self._folder / name, capacity, timeout_s=timeout_s):
            yield


@contextmanager
def turn(file: Path, *, timeout_s: float) -> Iterator[None]:
    """Locks `file` for the block, one holder on this host. Raises: TimeoutError: not free within `timeout_s`."""
    with _slot(file, 1, timeout_s=timeout_s):
        yield


@contextmanager
def _slot(place: Path, count: int, *, timeout_s: float) -> Iterator[None]:
    """Holds one of `count` slots, each a locked file on this host. Raises: TimeoutError: none was free."""
    deadline = time.monotonic() + timeout_s
    while (handle := _lock_one(place, count)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"one of {count} slots {place.name!r} was not free in time")
        time.sleep(_RETRY_S * random.uniform(0.5, 1.5))
    try:
        yield
    finally:
        os.close(handle)


def _lock_one(place: Path, count: int) -> int | None:
    place.parent.mkdir(parents=True, exist_ok=True)
    for number in random.sample(range(count), count):
        handle = os.open(f"{place}.{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
        else:
            return handle
    return None
