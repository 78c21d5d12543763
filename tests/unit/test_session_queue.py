"""The queue before commands: a few start at a time, first come first served, and none waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from app.environments.session import commands
from app.environments.session.commands import CommandQueue


class Starters:
    """Threads that each hold a place in a queue until they are let go."""

    def __init__(self, places: int) -> None:
        self.queue = CommandQueue(places)
        self.started: list[int] = []
        self._go = [threading.Event() for _ in range(10)]
        self._threads: list[threading.Thread] = []

    def add(self, number: int) -> None:
        """Returns when it has started or waits."""
        waiting = len(self.queue._waiting)
        self._threads.append(threading.Thread(target=self._start, args=(number,)))
        self._threads[-1].start()
        self.until(lambda: number in self.started or len(self.queue._waiting) > waiting)

    def _start(self, number: int) -> None:
        with self.queue:
            self.started.append(number)
            self._go[number].wait(30)

    def go(self, number: int) -> None:
        self._go[number].set()

    def until(self, true: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 30
        while not true():
            assert time.monotonic() < give_up
            time.sleep(0.001)

    def end(self) -> None:
        for event in self._go:
            event.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        assert (self.queue._starting, len(self.queue._waiting)) == (0, 0)


@pytest.fixture
def starters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starters]:
    monkeypatch.setattr(commands, "_QUEUED_S", 30.0)
    made = Starters(2)
    yield made
    made.end()


def test_with_others_waiting_fewer_start_and_the_first_to_come_is_the_first(starters: Starters) -> None:
    for number in range(8):
        starters.add(number)
    assert starters.started == [0, 1, 2, 3]
    for number in (0, 1):
        starters.go(number)
        starters.until(lambda number=number: starters.queue._starting == 3 - number)  # type: ignore[misc]
    assert starters.started == [0, 1, 2, 3], "it comes down to two at a time while others wait"
    for number in (2, 3, 4):
        starters.go(number)
        starters.until(lambda number=number: len(starters.started) == number + 3)  # type: ignore[misc]
    assert starters.started == [0, 1, 2, 3, 4, 5, 6]


def test_one_that_waits_too_long_starts_all_the_same(starters: Starters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_QUEUED_S", 0.05)
    for number in range(7):
        starters.add(number)
    starters.until(lambda: len(starters.started) == 7)
