"""Redis killed, emptied, cut off, half-open. Messages are hints: none of this may cost a task."""

from __future__ import annotations

import time

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.load import submit_both, under_load
from tests.chaos.work import Work


@case("redis-kill-data-lost")
def redis_kill_data_lost(fixture: Fixture) -> None:
    """SIGKILL to Redis under load, and it comes back empty, twice."""
    under_load(fixture)
    for _ in range(2):
        fixture.struck("redis SIGKILL, data lost")
        fixture.servers.kill_redis(keep_data=False)
        time.sleep(1)
        fixture.servers.start_redis()
        time.sleep(3)


@case("redis-connections-cut")
def redis_connections_cut(fixture: Fixture) -> None:
    """CLIENT KILL of everybody, again and again under load."""
    under_load(fixture)
    with fixture.servers.redis() as client:
        for _ in range(8):
            fixture.struck("CLIENT KILL")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            time.sleep(0.7)


@case("redis-half-open", relays=("redis",), within_s=150)
def redis_half_open(fixture: Fixture) -> None:
    """Every connection to Redis goes silent without closing: Redis hands hints to consumers that never hear them."""
    under_load(fixture)
    assert fixture.redis_relay is not None
    fixture.struck("redis half-open")
    fixture.redis_relay.freeze()


@case("redis-hangs", within_s=120)
def redis_hangs(fixture: Fixture) -> None:
    """Redis stands still for three leases, as one that swaps does, while workers with long tasks renew in PostgreSQL:
    what runs goes on, what waits waits."""
    fixture.start()
    fixture.pool_ready()
    submit_both(fixture, 4, Work(seconds=8.0))
    fixture.acting(5)
    fixture.struck("redis SIGSTOP")
    fixture.servers.pause_redis(9.0)
    again = fixture.rows("SELECT count(*) FROM attempts WHERE state = 'lost'")[0][0]
    if again:
        fixture.wrong.append(f"{again} attempts lost their lease although PostgreSQL was there all the time")


@case("redis-away-at-the-start")
def redis_away_at_the_start(fixture: Fixture) -> None:
    """Redis is away when tasks are accepted and stays away for a while: they are safe, and run when it is back."""
    fixture.start()
    fixture.pool_ready()
    fixture.struck("redis SIGKILL")
    fixture.servers.kill_redis(keep_data=True)
    fixture.submit(6, mode=Mode.EPHEMERAL, name="e")
    fixture.submit(6, mode=Mode.PERSISTENT, name="p")
    time.sleep(8)
    fixture.servers.start_redis()
