"""Mode `auto` by expected cost: the rule, and committed workloads on which it must beat every fixed mode."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from app.models.spec import Mode
from app.scheduling import policy
from app.scheduling.policy import Forecast, PoolOutlook, QueuedTask, TaskQueue, UserShare
from bench.auto import __main__ as auto
from bench.auto import workloads

E, P = Mode.EPHEMERAL, Mode.PERSISTENT
CHEAP_POOL = Forecast({E: 160.0, P: 100.0}, {E: 4.0, P: 1.0})


def _admitted(
    forecasts: list[Forecast | None], *, free: dict[Mode, int], pool: PoolOutlook | None = None
) -> list[tuple[int, Mode]]:
    queue = TaskQueue(
        "ann", Mode.AUTO, "standard", [QueuedTask(n, 0, n, forecast=one) for n, one in enumerate(forecasts)]
    )
    slots = Counter({(mode, "standard"): count for mode, count in free.items()})
    pools = None if pool is None else {"standard": pool}
    return policy.admit([queue], slots, slots, {"ann": UserShare()}, pools=pools).chosen


def test_without_a_forecast_a_free_slot_of_the_pool_comes_first() -> None:
    assert _admitted([None, None], free={E: 1, P: 1}) == [(0, P), (1, E)]


def test_of_two_free_modes_the_cheaper_one_is_taken_that_is_in_time() -> None:
    spot = Forecast({E: 160.0, P: 100.0}, {E: 0.4, P: 1.0}, due_s=200.0)
    assert _admitted([CHEAP_POOL, spot, spot._replace(due_s=120.0)], free={E: 3, P: 3}) == [(0, P), (1, E), (2, P)]


def test_a_task_waits_for_the_pool_when_that_is_cheaper_and_no_later() -> None:
    soon, late = (PoolOutlook(slots=4, release_s=seconds) for seconds in (60.0, 61.0))
    assert _admitted([CHEAP_POOL], free={E: 1}, pool=soon) == []
    assert _admitted([CHEAP_POOL], free={E: 1}, pool=late) == [(0, E)]


def test_the_second_who_waits_waits_twice_as_long_and_those_behind_are_not_held_up() -> None:
    pool = PoolOutlook(slots=4, release_s=40.0)
    assert _admitted([CHEAP_POOL] * 3, free={E: 9}, pool=pool) == [(1, E), (2, E)]


def test_a_deadline_lets_a_task_wait_longer_than_an_instance_would_boot() -> None:
    patient = CHEAP_POOL._replace(due_s=1000.0)
    assert _admitted([patient], free={E: 1}, pool=PoolOutlook(slots=4, release_s=800.0)) == []
    assert _admitted([patient], free={E: 1}, pool=PoolOutlook(slots=4, release_s=950.0)) == [(0, E)]


def test_a_crowd_waits_for_the_pool_to_grow_and_one_alone_does_not() -> None:
    pool = PoolOutlook(slots=4, boot_s=60.0, cooldown_s=60.0, room=40)
    spot = Forecast({E: 160.0, P: 100.0}, {E: 3.0, P: 1.0})
    assert _admitted([spot], free={E: 9}, pool=pool) == [(0, E)]
    assert _admitted([spot] * 5, free={E: 9}, pool=pool) == [(4, E)]


@pytest.mark.parametrize("name", ["mixed, seed 1", "mixed, seed 2", "mixed, seed 3", "adverse"])
def test_a_mixed_job_costs_less_than_in_every_fixed_mode_at_the_same_p95(name: str) -> None:
    found = auto.compare(name, workloads.load()[name])
    assert found.usd[Mode.AUTO] < min(found.usd[mode] for mode in auto.FIXED)
    assert found.slower <= auto.EQUAL


def test_the_committed_workloads_are_those_that_the_module_makes() -> None:
    made = json.loads(json.dumps(workloads.make()))
    assert json.loads(workloads.FILE.read_text()) == made
