"""Turns and limits: who may start an environment, build or pull an image now.

A worker brings a gate that the ledger keeps for all hosts. Without one, file locks bound the processes of this host;
the kernel frees them when a holder dies.
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


class Gate(Protocol):
    """Lets only so many in at a time."""

    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> AbstractContextManager[None]:
        """Wait for a place at the named limit and keep it for the block.

        `limit` is `KIND:SUBJECT`, e.g. `environment_starts:HOST`. `capacity` is what holds unless somebody has set
        another; None: no bound. Not to be nested in itself: two blocks would wait for each other's place.

        Raises: TimeoutError: no place was free within `timeout_s`, or whoever waits was told to stop. Whatever else it
        raises is a fault of the infrastructure, never of the task.
        """
        ...


class HostGate:
    """The gate of a process without a ledger: file locks under `folder`, for this host alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> Iterator[None]:
        if capacity is None:
            yield
            return
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", limit)
        with HostSlots(self._folder, name, capacity).hold(timeout_s=timeout_s):
            yield


class HostSlots:
    """At most `count` holders at once on this host, whatever process or thread they are in."""

    def __init__(self, folder: Path, name: str, count: int) -> None:
        self._files = [folder / f"{name}.{number}" for number in range(count)]

    @contextmanager
    def hold(self, *, timeout_s: float) -> Iterator[None]:
        """Wait for a slot and keep it for the block.

        Raises: TimeoutError: none was free within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        handle = self._take(deadline)
        try:
            yield
        finally:
            os.close(handle)

    def _take(self, deadline: float) -> int:
        while True:
            for file in random.sample(self._files, len(self._files)):
                handle = _try(file)
                if handle is not None:
                    return handle
            _wait(deadline, f"one of {len(self._files)} slots {self._files[0].stem!r}")


@contextmanager
def turn(file: Path, *, timeout_s: float) -> Iterator[None]:
    """One holder of `file` at a time on this host.

    Raises: TimeoutError: the holder did not end within `timeout_s`.
    """
    with HostSlots(file.parent, file.name, 1).hold(timeout_s=timeout_s):
        yield


def _try(file: Path) -> int | None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError(f"{what} was not free in time")
    time.sleep(_RETRY_S * random.uniform(0.5, 1.5))
