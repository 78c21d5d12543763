"""Measures an agent's time and waits for its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from app.agents.framework import Stop
from app.errors import MegaFlowError
from app.models.shell import CancelToken

log = structlog.get_logger(__name__)


class Clock:
    """Counts down `limit_s` from its creation, plus the waiting time `waited_s`, at most `limit_s` again."""

    def __init__(self, limit_s: float, waited_s: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._waited_s = waited_s
        self._granted_s = 0.0
        self._begun = time.monotonic()

    def left_s(self) -> float:
        return max(0.0, self._begun + self._limit_s + self._granted_s - time.monotonic())

    def is_up(self) -> bool:
        """Whether no time is left. `waited_s` is called only when the time seems to be over."""
        if self.left_s() > 0.0:
            return False
        try:
            waited_s = self._waited_s()
        except MegaFlowError as error:
            log.warning("agent.waits_unknown", reason=str(error))
            waited_s = 0.0
        self._granted_s = max(self._granted_s, min(self._limit_s, waited_s))
        return self.left_s() <= 0.0


def await_end(bell: threading.Event, ended: Callable[[], bool], clock: Clock, cancel: CancelToken) -> Stop:
    """Waits until the process has ended (which sets `bell`), its time is up, or `cancel` is set."""
    cancelled = threading.Event()

    def stop() -> None:
        cancelled.set()
        bell.set()

    take_back = cancel.on_cancel(stop)
    try:
        while True:
            bell.wait(clock.left_s())
            bell.clear()  # before the checks: later events set it again
            if cancelled.is_set():
                return Stop.CANCEL
            if ended():
                return Stop.ITSELF
            if clock.is_up():
                return Stop.TIMEOUT
    finally:
        take_back()
