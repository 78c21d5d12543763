"""What a worker's pool gives out: recycled before fresh, and shared ones to several at once."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from app.environments.contract import Environment, Origin, Tags
from app.environments.pool import EnvironmentPool
from app.errors import EnvironmentFailed
from app.models.spec import EnvironmentSpec, Reuse
from tests.unit.fake_environments import FakeEnvironment, FakeProvider, World, an_attempts

PLAIN = EnvironmentSpec(image="a")
SHARED = EnvironmentSpec(image="a", reuse=Reuse.SHARED_READONLY)
RUN = uuid.uuid4()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def provider(world: World) -> FakeProvider:
    return FakeProvider(world)


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    made = EnvironmentPool(max_idle=2)
    yield made
    made.close()


Acquire = Callable[..., tuple[Environment, Origin]]


@pytest.fixture
def acquire(pool: EnvironmentPool, provider: FakeProvider) -> Acquire:
    def ask(
        spec: EnvironmentSpec = PLAIN, *, tags: Tags | None = None, reuse: bool = True, timeout_s: float = 5
    ) -> tuple[Environment, Origin]:
        found = tags or an_attempts(RUN)
        return pool.acquire(provider, spec, found, "id-of-a", timeout_s=timeout_s, allow_reuse=reuse)

    return ask


def test_a_recycled_one_goes_before_a_new_one(pool: EnvironmentPool, acquire: Acquire) -> None:
    used, origin = acquire()
    assert origin is Origin.FRESH
    pool.release(used, reuse=True)
    assert acquire() == (used, Origin.RECYCLED)
    third, origin = acquire()
    assert (third.id != used.id, origin) == (True, Origin.FRESH)


@pytest.mark.parametrize("clean", [True, False])
def test_one_with_set_up_commands_is_used_again_when_its_reset_says_that_it_is_clean(
    pool: EnvironmentPool, acquire: Acquire, clean: bool
) -> None:
    spec = PLAIN.model_copy(update={"setup": ("make",)})
    used, _ = acquire(spec)
    assert isinstance(used, FakeEnvironment)
    used.clean = clean
    proof = pool.release(used, reuse=True)
    assert proof is not None
    assert proof.clean is clean
    again, origin = acquire(spec)
    assert (again is used, origin) == (clean, Origin.RECYCLED if clean else Origin.FRESH)
    assert acquire(spec.model_copy(update={"setup": ("make it otherwise",)}))[0] is not used


def test_one_that_looks_different_after_its_reset_is_ended(
    pool: EnvironmentPool, world: World, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, _ = acquire()
    monkeypatch.setattr("app.environments.pool.differences", lambda before, after: ("a process",))
    proof = pool.release(used, reuse=True)
    assert proof is not None
    assert (proof.clean, proof.left, used.id in world.alive) == (False, ("a process",), False)


def test_the_oldest_go_when_more_are_idle_than_may_be(pool: EnvironmentPool, world: World, acquire: Acquire) -> None:
    used = [acquire()[0] for _ in range(3)]
    for one in used:
        pool.release(one, reuse=True)
    assert [one.id in world.alive for one in used] == [False, True, True]


def test_a_dead_one_is_not_handed_out_again(
    pool: EnvironmentPool, world: World, provider: FakeProvider, acquire: Acquire
) -> None:
    used, _ = acquire()
    pool.release(used, reuse=True)
    del world.alive[used.id]
    assert acquire()[0] is not used


def test_one_with_another_version_of_a_tool_is_not_used_again(
    pool: EnvironmentPool, provider: FakeProvider, acquire: Acquire
) -> None:
    spec = PLAIN.model_copy(update={"tools": ("agent",)})
    old, _ = acquire(spec)
    pool.release(old, reuse=True)
    provider.tools["agent"] = "2"
    new, origin = acquire(spec)
    assert (new is not old, origin) == (True, Origin.FRESH)
    pool.release(new, reuse=True)
    assert acquire(spec) == (new, Origin.RECYCLED)


def test_another_run_and_another_key_and_a_worker_that_may_not_reuse_have_their_own(acquire: Acquire) -> None:
    mine, _ = acquire(SHARED)
    others = [
        acquire(SHARED, tags=an_attempts())[0],
        acquire(SHARED.model_copy(update={"env": {"A": "b"}}))[0],
        acquire(SHARED, reuse=False)[0],
        acquire(PLAIN)[0],
    ]
    assert len({mine.id, *(one.id for one in others)}) == 5


def test_the_end_of_one_borrower_is_not_the_others(
    pool: EnvironmentPool, world: World, provider: FakeProvider, acquire: Acquire
) -> None:
    (one, _), (two, _) = acquire(SHARED), acquire(SHARED)
    failed: list[Exception] = []

    def work() -> None:
        try:
            one.run("block", timeout_s=30)
        except EnvironmentFailed as error:
            failed.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert provider.made[one.id].blocked.wait(5)
    begun = time.monotonic()
    one.destroy()
    worker.join(5)
    assert time.monotonic() - begun < 5
    assert "given back by this attempt" in str(failed[0])
    for call in (lambda: one.put("/x", b""), lambda: one.shell(), lambda: one.stats(), lambda: one.get_tree("/")):
        with pytest.raises(EnvironmentFailed):
            call()
    provider.made[one.id].release.set()
    assert two.run("true", timeout_s=5).ok
    assert one.reset().clean is False
    pool.release(one, reuse=False)
    assert two.stats().processes == 1
    pool.release(two, reuse=False)
    assert world.alive == {}


def test_a_shared_one_that_has_died_is_lent_to_nobody_else_and_ended_by_the_last(
    pool: EnvironmentPool, world: World, acquire: Acquire
) -> None:
    one, _ = acquire(SHARED)
    del world.alive[one.id]
    two, origin = acquire(SHARED)
    assert two.id != one.id
    assert origin is Origin.FRESH
    pool.release(one, reuse=False)
    assert two.run("true", timeout_s=5).ok
    assert acquire(SHARED)[0].id == two.id


def test_a_pool_that_closes_ends_what_is_lent_and_shared_and_idle(
    pool: EnvironmentPool, world: World, acquire: Acquire
) -> None:
    idle, _ = acquire()
    pool.release(idle, reuse=True)
    acquire(SHARED)
    acquire(reuse=False)
    assert len(world.alive) == 3
    pool.close()
    assert world.alive == {}
