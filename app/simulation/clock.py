"""Implements the event loop of a simulated fleet: one thread, a heap of due events."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

_TICK_S = 0.004
"""Calls due within this time are executed together."""
_LONGEST_S = 0.5


class SimulationClock:
    """Executes callbacks on the thread that calls `turn`. An exception of a callback ends that thread."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def post(self, act: Callable[..., None], *values: Any) -> None:
        """Schedules a call soon. From any thread, and from signal handlers."""
        self._inbox.put((act, values))

    def after(self, delay_s: float, act: Callable[..., None], *values: Any) -> None:
        """Schedules a call after a delay in seconds. From the clock's own thread only."""
        self.at(time.monotonic() + delay_s, act, *values)

    def at(self, due: float, act: Callable[..., None], *values: Any) -> None:
        """Schedules a call at `due` (monotonic seconds). From the clock's own thread only."""
        heapq.heappush(self._due, (due, next(self._order), act, values))

    def quiet(self) -> bool:
        """Whether all posted calls are executed. Calls due later do not count."""
        return self._inbox.empty()

    def turn(self) -> None:
        """Waits for due or posted calls, and executes all of them."""
        due_s = self._due[0][0] - time.monotonic() if self._due else _LONGEST_S
        self._hear(max(_TICK_S, min(_LONGEST_S, due_s)))
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, act, values = heapq.heappop(self._due)
            act(*values)

    def _hear(self, patience_s: float) -> None:
        try:
            act, values = self._inbox.get(timeout=patience_s)
            while True:
                act(*values)
                act, values = self._inbox.get_nowait()
        except Empty:
            return
