"""The lanes of one environment: kept, handed out one per command, all cut off at once when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from app.environments.session.connect import Connect
from app.environments.session.lane import Lane, LaneLost
from app.errors import EnvironmentFailed

_GREETING_S = 10.0
_REPLACEMENT_S = 2.0
_KEPT = 16
"""Idle lanes beyond this are closed: each is a small process inside."""


class Lanes:
    """Safe for many threads. Raises EnvironmentFailed from every method once `close` was called.

    Once one was connected, one stays so: a helper that nobody is connected to takes its client for dead. What is taken
    apart does not count, since it goes with its program.
    """

    def __init__(self, connect: Connect, label: str, ended: Callable[[], None] | None = None) -> None:
        """ended: raises when the environment was ended for a reason, which goes before what is seen here."""
        self._connect = connect
        self._ended = ended
        self._label = label
        self._lock = threading.Lock()
        self._idle: list[Lane] = []
        self._busy: set[Lane] = set()
        self._apart: set[Lane] = set()
        self._closed = False

    def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as a lane answers; asks every millisecond at first."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.001
        while True:
            try:
                return self.give(self.take(max(0.05, deadline - time.monotonic())))
            except EnvironmentFailed as error:
                if self._closed or time.monotonic() >= deadline:
                    raise self.failed(f"expected an answer within {timeout_s:.1f} s; {error}") from error
            time.sleep(pause_s)
            pause_s = min(0.02, pause_s * 1.2)

    @contextmanager
    def lent(self, timeout_s: float) -> Iterator[Lane]:
        """A lane for one exchange that must be answered in `timeout_s`; one that broke off is not used again."""
        lane = self.take()
        lane.deadline = time.monotonic() + timeout_s
        try:
            yield lane
        except LaneLost as error:
            self.drop(lane)
            raise self.lost(error) from error
        except BaseException:
            self.drop(lane)
            raise
        self.give(lane)

    def take(self, timeout_s: float = _GREETING_S) -> Lane:
        """A lane of one's own: to be given back, or dropped."""
        if self._ended is not None:
            self._ended()
        while True:
            with self._lock:
                if self._closed:
                    raise self.failed("was destroyed")
                lane = self._idle.pop() if self._idle else None
                if lane is not None:
                    self._busy.add(lane)
            if lane is None:
                return self._fresh(timeout_s)
            if lane.quiet:
                return lane
            self._discard(lane)

    def take_apart(self) -> Lane:
        """A lane for as long as a program runs, to be dropped; another one stays connected."""
        if self._ended is not None:
            self._ended()
        lane = self._fresh(_GREETING_S)
        with self._lock:
            self._apart.add(lane)
        self._keep_one()
        return lane

    def _keep_one(self) -> None:
        with self._lock:
            if self._closed or self._idle or self._busy - self._apart:
                return
        with suppress(EnvironmentFailed):  # it is gone, which the next one to ask will hear
            self.give(self._fresh(_REPLACEMENT_S))

    def _fresh(self, timeout_s: float) -> Lane:
        try:
            lane = Lane(self._connect())
        except OSError as error:
            raise self.failed(f"cannot be reached: {error}") from error
        with self._lock:
            self._busy.add(lane)
            closed = self._closed
        if closed:
            lane.abort()
        try:
            lane.greet(timeout_s)
        except LaneLost as error:
            self._discard(lane)
            raise self.lost(error) from error
        return lane

    def give(self, lane: Lane) -> None:
        with self._lock:
            self._busy.discard(lane)
            keep = not self._closed and len(self._idle) < _KEPT
            if keep:
                self._idle.append(lane)
        if not keep:
            lane.close()

    def drop(self, lane: Lane) -> None:
        """Close it. Where it was the last, a fresh one is connected."""
        self._discard(lane)
        self._keep_one()

    def _discard(self, lane: Lane) -> None:
        with self._lock:
            self._busy.discard(lane)
            self._apart.discard(lane)
        lane.close()

    def alive(self, timeout_s: float = 2.0) -> bool:
        """Whether the helper answers on a fresh lane: whatever ended one may be about to end the idle ones."""
        try:
            lane = self._fresh(timeout_s)
        except EnvironmentFailed:
            return False
        self.give(lane)
        return True

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """What is under way hears it at once. Safe to call twice, from any thread."""
        with self._lock:
            self._closed = True
            idle, busy = self._idle, list(self._busy)
            self._idle = []
        for lane in busy:
            lane.abort()
        for lane in idle:
            lane.close()

    def lost(self, error: LaneLost) -> EnvironmentFailed:
        return self.failed("was destroyed") if self._closed else self.failed(f"is gone: {error}")

    def failed(self, what: str) -> EnvironmentFailed:
        if self._ended is not None:
            self._ended()
        return EnvironmentFailed(f"environment {self._label} {what}.")
