"""The order in which calls wait for a full engine: programs by what they had, users by tokens, all bounded."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from app.model_service.gateway import waiting
from app.model_service.gateway.waiting import DEFICIT, Place, TokenShares, WaitingLine


class Line:
    """A line, and who was let in."""

    def __init__(self) -> None:
        self.line, self.shares = WaitingLine(), TokenShares()
        self.places: dict[str, Place] = {}
        self.futures: dict[str, asyncio.Future[None]] = {}
        self.admitted: list[str] = []

    def add(self, name: str, user: str = "alice", *, timeout_s: float = 600.0, **values: Any) -> None:
        given = {"level": 0, "began": 0.0, "tokens": 1000} | values
        place = self.places[name] = self.shares.place("model", user, **given)
        future = self.futures[name] = self.line.add(place, timeout_s)
        future.add_done_callback(lambda done: None if done.cancelled() else self.admitted.append(name))

    async def admit(self, times: int = 1) -> list[str]:
        for _ in range(times):
            self.line.admit()
            await asyncio.sleep(0)
        return self.admitted


async def test_a_user_who_is_far_ahead_waits_for_the_others() -> None:
    line = Line()
    for number in range(4):
        line.add(f"a{number}", "alice", tokens=DEFICIT // 2 + 1)
    line.add("b", "bob", level=9, tokens=DEFICIT)

    assert await line.admit(5) == ["a0", "a1", "b", "a2", "a3"], "one call beyond the deficit, then the other user"


async def test_a_call_that_has_waited_for_half_of_its_time_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    line = Line()
    line.add("long", "alice", level=9, timeout_s=10.0, tokens=10 * DEFICIT)
    line.shares.leave(line.places["long"], 10 * DEFICIT)
    line.add("short", "bob", timeout_s=10.0)
    now = 104.9
    assert await line.admit() == ["short"]
    line.add("another", "bob", timeout_s=10.0)
    now = 105.1
    assert await line.admit() == ["short", "long"]


@pytest.mark.parametrize("seed", range(5))
async def test_users_who_always_have_calls_waiting_get_equal_tokens(seed: int) -> None:
    chance = random.Random(seed)
    line = Line()
    had = {"alice": 0, "bob": 0, "carol": 0}
    most = 20_000

    def another(user: str) -> None:
        values = {"level": chance.randrange(8), "began": chance.random(), "tokens": chance.randrange(most)}
        line.add(f"{user} {chance.random()}", user, **values)

    for user, calls in (("alice", 20), ("bob", 3), ("carol", 1)):
        for _ in range(calls):
            another(user)
    for _ in range(2000):
        name = (await line.admit())[-1]
        user, took = name.split()[0], chance.randrange(most)
        line.shares.leave(line.places[name], took)
        had[user] += took
        another(user)

    assert max(had.values()) - min(had.values()) <= DEFICIT + 2 * most
    assert min(had.values()) > 5_000_000
