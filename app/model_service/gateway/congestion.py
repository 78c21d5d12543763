"""Adapts how many concurrent calls one engine gets.

As TCP does it: the window doubles while nothing is lost (slow start), then grows by one for each window of successes,
and halves when the engine answers that it is overloaded. Further calls wait in a line (`waiting.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from app.model_service.gateway.waiting import Place, WaitingLine

START = 32.0
MOST = 16384.0
_SHRINK = 0.5
_SHORT_QUEUE = 4.0
_SHORT_SHARE = 0.1
_PAUSE_S = 0.5
_PAUSE_MOST_S = 15.0
_DOUBLINGS = 10
_REFUSALS_KEPT = 1000


class CongestionWindow:
    """Window of concurrent calls of one engine. For one event loop."""

    def __init__(self, *, start: float = START) -> None:
        self.size = start
        self.inside = 0
        self._start = start
        self._slow_start_until = MOST
        self._line = WaitingLine()
        self._shrunk_at = 0.0
        self._paused_until = 0.0
        self._busy_in_a_row = 0
        self._timer: asyncio.TimerHandle | None = None
        self._refused_at = deque[float](maxlen=_REFUSALS_KEPT)

    def refused(self, within_s: float) -> int:
        """Counts the calls that the engine refused as too many in the last `within_s` seconds."""
        return sum(at > time.monotonic() - within_s for at in self._refused_at)

    @property
    def waiting(self) -> int:
        return len(self._line)

    def try_enter(self, place: Place) -> bool:
        """Takes a slot if one is free at once."""
        if self._line or not self._open():
            return False
        self.inside += 1
        place.charge()
        return True

    async def enter(self, place: Place, timeout_s: float) -> None:
        """Takes a slot, and waits for it if necessary. Raises: TimeoutError: none was free in time."""
        if self.try_enter(place):
            return
        admitted = self._line.add(place, timeout_s)
        self._admit()
        try:
            async with asyncio.timeout(timeout_s):
                await admitted
        except BaseException:
            if not admitted.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Gives the slot back."""
        self.inside -= 1
        if self._line:
            self._admit()

    def accepted(self) -> None:
        """Handles an accepted call: the window may grow if it was the limiting factor."""
        self._busy_in_a_row = 0
        if self.inside + 1 >= self.size and self.size < MOST:
            self.size += 1.0 if self.size < self._slow_start_until else 1.0 / self.size
            if self._line:
                self._admit()

    def busy(self, entered_at: float, retry_after_s: float | None) -> None:
        """Handles a refusal, because of overload, of a call that entered at `entered_at`.

        The engine may name a time to retry. At a second refusal in a row, or if it names none or zero, the pause is at
        least the gateway's own backoff: an engine that always names zero would get retries without a pause.
        """
        now = time.monotonic()
        self._refused_at.append(now)
        if entered_at > self._shrunk_at:  # later refusals of the same burst add nothing
            self.size = max(1.0, min(self.size, float(self.inside + 1)) * _SHRINK)
            self._slow_start_until = self.size
            self._shrunk_at = now
            own = min(_PAUSE_MOST_S, _PAUSE_S * 2 ** min(self._busy_in_a_row, _DOUBLINGS))
            again = self._busy_in_a_row > 0  # its last retry time was too short
            self._busy_in_a_row += 1
            pause_s = max(own, retry_after_s or 0.0) if again or not retry_after_s else retry_after_s
            self._pause(now + pause_s)
        elif retry_after_s is not None:
            self._pause(now + retry_after_s)

    def loaded(self, waiting: int) -> None:
        """Handles a reported queue length. A short queue keeps the engine busy; a longer one shrinks the window."""
        if waiting <= max(_SHORT_QUEUE, self.inside * _SHORT_SHARE):
            return
        self.size = max(1.0, min(self.size, self.inside - waiting + max(_SHORT_QUEUE, self.inside * _SHORT_SHARE)))
        self._slow_start_until = min(self._slow_start_until, self.size)

    def reset(self) -> None:
        """Resets the window after the engine was unreachable: its capacity is unknown now."""
        self.size = min(self.size, self._start)
        self._slow_start_until = MOST
        self._paused_until = 0.0
        self._admit()

    def _open(self) -> bool:
        return self.inside < self.size and (self._paused_until == 0.0 or time.monotonic() >= self._paused_until)

    def _pause(self, until: float) -> None:
        self._paused_until = max(self._paused_until, until)
        self._wake_later()

    def _wake_later(self) -> None:
        if self._timer is None:
            delay = max(0.0, self._paused_until - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._resumed)

    def _resumed(self) -> None:
        self._timer = None
        if time.monotonic() < self._paused_until:
            self._wake_later()
            return
        self._paused_until = 0.0
        self._admit()

    def _admit(self) -> None:
        while self._line and self._open():
            self.inside += 1
            self._line.admit()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
