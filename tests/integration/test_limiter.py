"""The limits of model calls, against a real Redis, and a real PostgreSQL where capacities are read from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import redis.asyncio

from app.errors import BrokerUnavailable, CallThrottled, DatabaseUnavailable
from app.ledger import limits
from app.ledger.database import Database
from app.model_service.limiter import ModelLimiter, Permit, _raise_if_cancelled, in_use, ledger_capacities

PREFIX = "megaflow:test:limits"
CALL = {"run_id": "r1", "user": "alice", "model": "m"}


class Fixture:
    """A limiter on a real Redis, with capacities that a test changes as it goes."""

    def __init__(self, url: str, **capacities: int) -> None:
        self.url = url
        self.capacities = {name.replace("__", ":"): capacity for name, capacity in capacities.items()}
        self.granted: list[float] = []
        self.inside = self.most = 0

    async def current(self) -> Mapping[str, int]:
        return self.capacities

    @asynccontextmanager
    async def limiter(self, **options: float) -> AsyncIterator[ModelLimiter]:
        limiter = ModelLimiter(redis.asyncio.Redis.from_url(self.url), self.current, prefix=PREFIX, **options)
        try:
            yield limiter
        finally:
            await limiter.close()

    async def call(self, limiter: ModelLimiter, *, tokens: int = 1, lasts_s: float = 0.0, **who: str) -> Permit:
        async with limiter.call(**(CALL | who), tokens=tokens) as permit:  # type: ignore[arg-type]
            self.granted.append(time.monotonic())
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(lasts_s)
            self.inside -= 1
            return permit


async def test_what_has_no_limit_is_not_held_up(redis_url: str) -> None:
    fixture = Fixture(redis_url)

    async with fixture.limiter() as limiter:
        permit = await fixture.call(limiter, tokens=10**9)
        assert permit.waited == {}


async def test_no_more_calls_at_once_than_allowed(redis_url: str) -> None:
    fixture = Fixture(redis_url, model_concurrency__user__alice=3)

    async with fixture.limiter() as limiter, fixture.limiter() as another_process:
        calls = [fixture.call(one, lasts_s=0.03) for one in (limiter, another_process) for _ in range(12)]
        permits = await asyncio.gather(*calls)
        assert fixture.most == 3
        assert sum(1 for permit in permits if permit.waited.get("model_concurrency:user:alice", 0) > 0) >= 18


async def test_in_any_window_there_are_no_more_calls_than_allowed(redis_url: str) -> None:
    fixture = Fixture(redis_url, model_requests__run__r1=5)

    async with fixture.limiter(window_s=0.5) as limiter:
        await asyncio.gather(*(fixture.call(limiter) for _ in range(14)))
    fixture.granted.sort()
    # The sixth call after any call comes when that one has left the window (less what measuring it here may shift).
    assert all(b - a > 0.45 for a, b in zip(fixture.granted, fixture.granted[5:], strict=False))
    assert fixture.granted[-1] - fixture.granted[0] < 5


async def test_tokens_beyond_the_estimate_count_and_those_not_used_are_given_back(redis_url: str) -> None:
    fixture = Fixture(redis_url, model_tokens__user__alice=100)

    async with fixture.limiter(patience_s=0.1) as limiter:
        async with limiter.call(**CALL, tokens=90) as permit:
            permit.used(20)
        async with limiter.call(**CALL, tokens=70) as permit:
            permit.used(130)
        with pytest.raises(CallThrottled, match="model_tokens:user:alice"):
            await fixture.call(limiter, tokens=1)
    with redis.Redis.from_url(redis_url) as client:
        assert in_use(client, PREFIX)["model_tokens:user:alice"].used == 150


async def test_a_call_that_could_never_fit_is_refused_at_once_and_says_what_would_help(redis_url: str) -> None:
    fixture = Fixture(redis_url, model_tokens__user__alice=100)

    async with fixture.limiter() as limiter:
        with pytest.raises(CallThrottled, match="megaflow limits set model_tokens:user:alice 101"):
            await fixture.call(limiter, tokens=101)


async def test_a_call_refused_by_one_limit_uses_nothing_of_the_others(redis_url: str) -> None:
    fixture = Fixture(
        redis_url, model_requests__user__alice=10, model_concurrency__model__m=0, model_tokens__run__r1=10
    )

    async with fixture.limiter(patience_s=0.1) as limiter:
        with pytest.raises(CallThrottled) as caught:
            await fixture.call(limiter)
        assert caught.value.limit == "model_concurrency:model:m"
    with redis.Redis.from_url(redis_url) as client:
        assert in_use(client, PREFIX) == {}


async def test_a_large_call_is_not_overtaken_by_small_ones(redis_url: str) -> None:
    fixture = Fixture(redis_url, model_tokens__user__alice=100)
    order: list[int] = []

    async def one(limiter: ModelLimiter, tokens: int) -> None:
        async with limiter.call(**CALL, tokens=tokens):
            order.append(tokens)

    async with fixture.limiter(window_s=0.4) as limiter:
        await one(limiter, 50)
        large = asyncio.create_task(one(limiter, 80))
        await asyncio.sleep(0.05)
        await asyncio.gather(large, one(limiter, 30))  # both at once are too much: the answers cannot cross
    assert order == [50, 80, 30]


async def test_who_died_gives_their_concurrency_back_after_the_lease_and_who_lives_is_renewed(redis_url: str) -> None:
    fixture = Fixture(redis_url, model_concurrency__user__alice=2)
    name = "model_concurrency:user:alice"

    async with fixture.limiter(lease_s=0.4) as limiter, limiter.call(**CALL, tokens=1):
        with redis.Redis.from_url(redis_url) as client:
            client.zadd(f"{PREFIX}:members:{name}", {"dead": time.time() * 1000 + 600})  # what a kill leaves behind
            assert in_use(client, PREFIX)[name].used == 2
            permit = await fixture.call(limiter)
            assert 0.2 < permit.waited[name] < 3
            await asyncio.sleep(0.5)
            assert in_use(client, PREFIX)[name].used == 1


async def test_a_cancellation_is_heeded_whenever_it_comes(redis_url: str) -> None:
    """Also in the very moment in which Redis answers: what sends the question forgets it then, about once in 15."""
    fixture = Fixture(redis_url, model_concurrency__user__alice=1)

    async with fixture.limiter(patience_s=20.0) as limiter, limiter.call(**CALL, tokens=1):
        for count in range(150):
            waiting = asyncio.create_task(fixture.call(limiter))
            await asyncio.sleep(count * 0.0001)
            waiting.cancel()
            await asyncio.wait([waiting], timeout=5.0)
            assert waiting.cancelled(), f"cancelled after {count * 0.1:.1f} ms, it went on"
    assert not fixture.granted


async def test_a_failing_call_gives_its_permit_back(redis_url: str) -> None:
    fixture = Fixture(redis_url, model_concurrency__user__alice=1)

    async with fixture.limiter(patience_s=0.1) as limiter:
        with pytest.raises(RuntimeError):
            async with limiter.call(**CALL, tokens=1):
                raise RuntimeError
        await fixture.call(limiter)


async def test_a_limit_for_all_counts_each_of_them_apart(redis_url: str) -> None:
    fixture = Fixture(redis_url, **{"model_concurrency:user:*": 1, "model_concurrency:user:bob": 2})

    async with (
        fixture.limiter(patience_s=0.1) as limiter,
        limiter.call(**CALL, tokens=1),
        limiter.call(**(CALL | {"user": "carol"}), tokens=1),
    ):
        await asyncio.gather(*(fixture.call(limiter, user="bob", lasts_s=0.05) for _ in range(2)))
        with pytest.raises(CallThrottled, match="model_concurrency:user:alice"):
            await fixture.call(limiter)


async def test_a_lost_answer_does_not_make_a_call_wait_for_itself(redis_url: str) -> None:
    fixture = Fixture(
        redis_url, model_requests__user__alice=1, model_concurrency__user__alice=1, model_tokens__run__r1=9
    )

    async with fixture.limiter(patience_s=1) as limiter:
        ask, answers = limiter._ask, []

        async def deaf(*values: Any) -> Any:
            answers.append(await ask(*values))
            if len(answers) == 1:
                raise redis.ConnectionError("the answer was lost")
            return answers[-1]

        limiter._ask = deaf  # type: ignore[method-assign]
        await fixture.call(limiter, tokens=9)
        assert answers == [None, None]
    with redis.Redis.from_url(redis_url) as client:
        assert {name: use.used for name, use in in_use(client, PREFIX).items()} == {
            "model_requests:user:alice": 1,
            "model_tokens:run:r1": 9,
        }


async def test_a_redis_that_does_not_answer_is_named_after_a_bounded_wait() -> None:
    fixture = Fixture("redis://127.0.0.1:1", model_concurrency__user__alice=1)

    async with fixture.limiter(patience_s=0.2) as limiter:
        with pytest.raises(BrokerUnavailable):
            await fixture.call(limiter)


async def test_capacities_come_from_the_ledger_and_the_last_known_ones_stay_when_it_is_away(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(database_url)
    limits.set_limit(database, "model_requests:user:alice", 7)
    limits.set_limit(database, "image_builds:h", 1)
    monkeypatch.setattr("app.model_service.limiter._CACHED_S", 0.0)

    try:
        current = ledger_capacities(database)
        assert await current() == {"model_requests:user:alice": 7}
        await asyncio.to_thread(limits.set_limit, database, "model_requests:user:alice", 8)
        assert await current() == {"model_requests:user:alice": 8}
        database.close()
        away = Database("postgresql://postgres@/none?host=/nowhere")
        database.engine = away.engine
        assert await current() == {"model_requests:user:alice": 8}
        with pytest.raises(DatabaseUnavailable):
            await ledger_capacities(away)()
    finally:
        database.close()


async def test_what_is_given_back_while_others_are_renewed_is_not_renewed(redis_url: str) -> None:
    fixture = Fixture(redis_url, model_concurrency__user__alice=5)

    async with fixture.limiter(lease_s=0.3) as limiter:
        ended, renewed, renew = asyncio.Event(), [], limiter._renew

        async def slow(**asked: Any) -> object:
            renewed.append(asked["args"][0])
            await ended.wait()
            return await renew(**asked)

        limiter._renew = slow  # type: ignore[assignment]
        async with limiter.call(**CALL, tokens=1):
            async with limiter.call(**CALL, tokens=1):
                while not renewed:
                    await asyncio.sleep(0.01)
            ended.set()
            await asyncio.sleep(0.05)
            with redis.Redis.from_url(redis_url) as client:
                assert in_use(client, PREFIX)["model_concurrency:user:alice"].used == 1


@pytest.mark.parametrize("outcome", [None, ConnectionResetError("gone")])
async def test_a_cancellation_that_was_swallowed_is_found_whatever_came_instead(outcome: Exception | None) -> None:
    async def swallowing() -> None:
        with _raise_if_cancelled():
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                if outcome is not None:
                    raise outcome from None

    task = asyncio.create_task(swallowing())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
