"""Turns: a few at a time, first come first served, and nobody waits for ever."""

from __future__ import annotations

import threading
import time

import pytest

from app.environments.session import turns
from app.environments.session.turns import Turns


class Line:
    """Threads that take a turn and hold it until they are told."""

    def __init__(self, places: int) -> None:
        self.turns = Turns(places)
        self.begun: list[int] = []
        self._go = [threading.Event() for _ in range(40)]
        self._threads: list[threading.Thread] = []

    def come(self, number: int) -> None:
        """Stand in line; returns when it is at work or waits."""
        thread = threading.Thread(target=self._stand, args=(number,))
        self._threads.append(thread)
        waiting = len(self.turns._waiting)
        thread.start()
        self.until(lambda: number in self.begun or len(self.turns._waiting) > waiting)

    def _stand(self, number: int) -> None:
        with self.turns:
            self.begun.append(number)
            self._go[number].wait(30)

    def go(self, number: int) -> None:
        self._go[number].set()

    def until(self, true: object) -> None:
        give_up = time.monotonic() + 30
        while not true():  # type: ignore[operator]
            assert time.monotonic() < give_up
            time.sleep(0.001)

    def end(self) -> None:
        for event in self._go:
            event.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def test_nobody_waits_where_few_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_S", 30.0)
    line = Line(2)
    for number in range(4):
        line.come(number)
    assert line.begun == [0, 1, 2, 3]
    line.end()


def test_with_others_waiting_fewer_begin_and_the_first_to_come_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_S", 30.0)
    line = Line(2)
    for number in range(8):
        line.come(number)
    assert line.begun == [0, 1, 2, 3]
    for number in (0, 1):
        line.go(number)
        line.until(lambda number=number: line.turns._beginning == 3 - number)
    assert line.begun == [0, 1, 2, 3], "it comes down to two at a time while others wait"
    for number in (2, 3, 4):
        line.go(number)
        line.until(lambda number=number: len(line.begun) == number + 3)
    assert line.begun == [0, 1, 2, 3, 4, 5, 6]
    line.end()
    assert line.begun == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (line.turns._beginning, len(line.turns._waiting)) == (0, 0)


def test_whoever_waits_too_long_begins_all_the_same_and_the_count_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.05)
    line = Line(1)
    for number in range(5):
        line.come(number)
    line.until(lambda: len(line.begun) == 5)
    line.end()
    assert (line.turns._beginning, len(line.turns._waiting)) == (0, 0)


def test_many_that_come_and_go_leave_nothing_behind() -> None:
    shared, most, now, lock = Turns(2), 0, 0, threading.Lock()

    def work() -> None:
        nonlocal most, now
        for _ in range(200):
            with shared:
                with lock:
                    now += 1
                    most = max(most, now)
                with lock:
                    now -= 1

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert most <= 4
    assert (shared._beginning, len(shared._waiting)) == (0, 0)
