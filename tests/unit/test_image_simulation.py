"""The simulation behind the image cache's benchmark: its books balance, nobody beats the optimum, ours comes close."""

from __future__ import annotations

import pytest

from app.environments.image_store.eviction import total_bytes
from bench.images import BELADY, FIFO, GOAL, LRU, OURS, World, simulate


@pytest.mark.parametrize("shared", [False, True])
def test_the_books_balance_and_nobody_uses_more_than_there_is(shared: bool) -> None:
    disks, about = simulate(World("small", images=80, room=10, users=3, runs=2, slots=4, shared=shared))
    assert about["tasks"] > 300
    for disk in disks.values():
        assert disk.used_bytes == total_bytes(disk.here.values()) <= disk.room_bytes
        assert disk.pulls >= about["images asked for"]


def test_ours_is_near_the_optimum_and_the_others_are_not() -> None:
    disks, _ = simulate(World("small", images=80, room=10, users=3, runs=2, slots=4, shared=False, low=1.0, stale=2))
    best = disks[BELADY].pulls
    assert best <= disks[OURS].pulls <= GOAL * best
    assert min(disks[LRU].pulls, disks[FIFO].pulls) > GOAL * best
