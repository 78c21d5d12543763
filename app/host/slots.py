"""Limits how many starts, builds and pulls run at a time on this host.

A worker brings a semaphore that the ledger keeps for all hosts. Without one, file locks bound the processes of this
host; the kernel frees them when a holder dies.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

_RETRY_S = 0.02
_GIVE_WAY_S = 2 * _RETRY_S
"""Longer than the pause between two looks at the files."""
_WAITING = "waiting"
"""The file that is shared by processes that wait for a slot."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class Semaphore(Protocol):
    """Bounds how many do something at a time."""

    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> AbstractContextManager[None]:
        """Wait for a place at the named limit and keep it for the block.

        `limit` is `KIND:SUBJECT`, e.g. `environment_starts:HOST`. `capacity` is the limit unless another
        was set; None: no bound. Not to be nested in itself: two blocks would wait for each other's place.

        Raises: TimeoutError: no place was free within `timeout_s`, or the wait was stopped. Anything else that it
        raises is a fault of the infrastructure, never of the task.
        """
        ...


class HostSemaphore:
    """The semaphore of a process without a ledger: file locks under `folder`, for this host alone."""

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
        self._place = folder / name  # what a file is called after
        self._count = count
        self._queue = _queue_of(self._place, count)

    @contextmanager
    def hold(self, *, timeout_s: float) -> Iterator[None]:
        """Wait for a slot and keep it for the block.

        Raises: TimeoutError: none was free within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        if not self._queue.acquire(timeout=max(0.0, timeout_s)):
            raise TimeoutError(f"{self._what} was not free in time")
        try:
            if time.monotonic() - self._queue.left_at < _GIVE_WAY_S:
                self._yield_to_others(deadline)
            handle = self._lock_one(deadline)
            try:
                yield
            finally:
                os.close(handle)
        finally:
            self._queue.left_at = time.monotonic()
            self._queue.release()

    @property
    def _what(self) -> str:
        return f"one of {self._count} slots {self._place.name!r}"

    def _try(self, what: int | str, how: int = fcntl.LOCK_EX) -> int | None:
        return _try(Path(f"{self._place}.{what}"), how)

    def _lock_one(self, deadline: float) -> int:
        waiting: int | None = None
        try:
            while True:
                for number in random.sample(range(self._count), self._count):
                    handle = self._try(number)
                    if handle is not None:
                        return handle
                if waiting is None:
                    waiting = self._try(_WAITING, fcntl.LOCK_SH)
                _wait(deadline, self._what)
        finally:
            if waiting is not None:
                os.close(waiting)

    def _yield_to_others(self, deadline: float) -> None:
        """Let another process have what this one has just left: the next thread of this one would be much sooner."""
        alone = self._try(_WAITING)
        if alone is not None:
            os.close(alone)
        elif (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(_GIVE_WAY_S, left_s))


# Where the threads of one process queue: only as many as there are slots try the files again and again, and a
# release wakes the next at once.
_queues: WeakValueDictionary[tuple[Path, int], _ThreadQueue] = WeakValueDictionary()
_lock = threading.Lock()


class _ThreadQueue(threading.Semaphore):
    left_at = -math.inf  # monotonic; of the last release


def _queue_of(place: Path, count: int) -> _ThreadQueue:
    with _lock:
        found = _queues.get((place, count))
        if found is None:
            found = _queues[place, count] = _ThreadQueue(count)
        return found


def _reset_after_fork() -> None:
    """In a fork, where the parent's threads will release nothing."""
    global _lock
    _lock = threading.Lock()
    _queues.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


@contextmanager
def turn(file: Path, *, timeout_s: float) -> Iterator[None]:
    """One holder of `file` at a time on this host.

    Raises: TimeoutError: the holder did not end within `timeout_s`.
    """
    with HostSlots(file.parent, file.name, 1).hold(timeout_s=timeout_s):
        yield


def _try(file: Path, how: int = fcntl.LOCK_EX) -> int | None:
    try:
        handle = os.open(file, _FLAGS, 0o600)
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, _FLAGS, 0o600)
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError(f"{what} was not free in time")
    time.sleep(_RETRY_S * random.uniform(0.5, 1.5))
