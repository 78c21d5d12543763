"""Turns and limits: who may start an environment, build or pull an image now.

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
_LOOK_MOST_S = 2 * _RETRY_S
"""Longer than the pause between two looks at the files."""
_WAITING = "waiting"
"""The file that is shared by those who look for a slot."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class Semaphore(Protocol):
    """Lets only so many in at a time."""

    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> AbstractContextManager[None]:
        """Wait for a place at the named limit and keep it for the block.

        `limit` is `KIND:SUBJECT`, e.g. `environment_starts:HOST`. `capacity` is what holds unless somebody has set
        another; None: no bound. Not to be nested in itself: two blocks would wait for each other's place.

        Raises: TimeoutError: no place was free within `timeout_s`, or whoever waits was told to stop. Whatever else it
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
        self._line = _line(self._place, count)

    @contextmanager
    def hold(self, *, timeout_s: float) -> Iterator[None]:
        """Wait for a slot and keep it for the block.

        Raises: TimeoutError: none was free within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        if not self._line.acquire(timeout=max(0.0, timeout_s)):
            raise TimeoutError(f"{self._what} was not free in time")
        try:
            if time.monotonic() - self._line.left_at < _LOOK_MOST_S:
                self._give_way(deadline)
            handle = self._take(deadline)
            try:
                yield
            finally:
                os.close(handle)
        finally:
            self._line.left_at = time.monotonic()
            self._line.release()

    @property
    def _what(self) -> str:
        return f"one of {self._count} slots {self._place.name!r}"

    def _try(self, what: int | str, how: int = fcntl.LOCK_EX) -> int | None:
        return _try(Path(f"{self._place}.{what}"), how)

    def _take(self, deadline: float) -> int:
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

    def _give_way(self, deadline: float) -> None:
        """Let another process have what this one has just left: whoever is next in our own line is here much sooner."""
        nobody = self._try(_WAITING)
        if nobody is not None:
            os.close(nobody)
        elif (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(_LOOK_MOST_S, left_s))


# Where the threads of one process queue: only as many as there are slots look at the files, over and over, and who
# leaves a slot wakes the next at once.
_lines: WeakValueDictionary[tuple[Path, int], _Line] = WeakValueDictionary()
_lock = threading.Lock()


class _Line(threading.Semaphore):
    left_at = -math.inf  # monotonic; when somebody left a slot


def _line(place: Path, count: int) -> _Line:
    with _lock:
        found = _lines.get((place, count))
        if found is None:
            found = _lines[place, count] = _Line(count)
        return found


def _begin_anew() -> None:
    """In a fork, where nobody will give back what the parent's threads have."""
    global _lock
    _lock = threading.Lock()
    _lines.clear()


os.register_at_fork(after_in_child=_begin_anew)


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
