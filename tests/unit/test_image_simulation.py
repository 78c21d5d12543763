"""The simulation behind the image cache's benchmark: its books balance, nobody beats the optimum, ours comes close."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.images.eviction import total_bytes
from bench.images import BELADY, FIFO, GOAL, LRU, OURS, simulate
from bench.images_queue import World


@pytest.mark.parametrize("shared", [False, True])
def test_the_books_balance_and_nobody_uses_more_than_there_is(shared: bool) -> None:
    fleets, about = simulate(World("small", images=80, room=10, users=3, runs=2, slots=4, shared=shared))
    assert about["tasks"] > 300
    for fleet in fleets.values():
        (disk,) = fleet.disks
        assert disk.used_bytes == total_bytes(disk.here.values()) <= disk.room_bytes
        assert fleet.pulls == disk.pulls >= about["images asked for"]


def test_ours_is_near_the_optimum_and_the_others_are_not() -> None:
    fleets, _ = simulate(World("small", images=80, room=10, users=3, runs=2, slots=4, shared=False, low=1.0, stale=2))
    best = fleets[BELADY].pulls
    assert best <= fleets[OURS].pulls <= GOAL * best
    assert min(fleets[LRU].pulls, fleets[FIFO].pulls) > GOAL * best


def test_hosts_that_get_the_tasks_whose_image_they_have_pull_half_as_much_and_start_as_many() -> None:
    small = World("small", images=80, room=10, users=3, runs=2, slots=4, shared=False, hosts=3)
    anywhere, before = simulate(small)
    placed, after = simulate(replace(small, placed=True))
    assert before["tasks"] == after["tasks"]
    assert 2 * placed[OURS].pulls < anywhere[OURS].pulls
    assert placed[OURS].pulls < anywhere[BELADY].pulls
