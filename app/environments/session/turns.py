"""Who may begin a command now: a few at a time, first come first served.

A host begins a command about as fast alone as among a hundred, which it would only keep from ending: with many
environments in one process their beginnings are put in line, and each ends soon after it began. What takes long has its
turn only while it begins.
"""

from __future__ import annotations

import os
import threading
from collections import deque

BEGINNING_S = 0.005
"""So long a command counts as one that begins; most have ended then."""
_PATIENCE_S = 0.25
"""Nobody waits longer, whatever those before him do."""


class Turns:
    """A context manager around the beginning of a command; safe for many threads.

    places: commands that begin at the same time while others wait. Twice as many may before anybody has to, since
    standing in line costs something, too.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._beginning = 0
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._waiting and self._beginning < 2 * self._places:
                self._beginning += 1
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if not mine.acquire(timeout=_PATIENCE_S):
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    self._beginning += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._beginning -= 1
            if self._waiting and self._beginning < self._places:
                self._beginning += 1
                self._waiting.popleft().release()


TURNS = Turns(2 * len(os.sched_getaffinity(0)))
"""Of this process."""
