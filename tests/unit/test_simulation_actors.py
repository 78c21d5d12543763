"""The random_model of simulated attempts, and the clock that they live by."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from app.ledger.attempts import Claim
from app.models.outcome import Phase
from app.models.simulation import FATES, Simulation
from app.models.spec import Mode
from app.simulation.instances import RandomModel, Step
from tests.building import a_spec, new_id


def _claim(name: str = "example-1") -> Claim:
    spec = a_spec(name, mode=Mode.EPHEMERAL)
    return Claim(new_id(), 1, new_id(), new_id(), new_id(), Mode.EPHEMERAL, datetime.now(UTC), spec)


def _kinds(course: list[Step]) -> list[str]:
    return [step.kind for step in reversed(course)]


def test_an_attempt_passes_all_phases_in_order_within_its_time_and_ends() -> None:
    course = RandomModel(Simulation.of(run_s="constant:10")).course(_claim(), now=100.0)
    on_the_way = [step.phase for step in reversed(course) if step.kind == "phase"]
    in_place = [one for one in Phase if one not in (Phase.GRADING_QUEUED, Phase.GRADING_STARTED)]
    assert on_the_way == in_place[in_place.index(Phase.IMAGE_READY) : in_place.index(Phase.TORN_DOWN)]
    assert (course[0].kind, course[0].at) == ("end", 110.0)
    assert [step.at for step in course] == sorted((step.at for step in course), reverse=True)


@pytest.mark.parametrize("fate", [fate for fate in FATES if fate != "freeze"])
def test_a_fate_strikes_within_the_attempts_time_and_takes_its_end_away(fate: str) -> None:
    course = RandomModel(Simulation.of(run_s="constant:10", **{fate: 1.0})).course(_claim(), now=100.0)
    (struck,) = [step for step in course if step.kind == fate]
    assert 100.0 <= struck.at <= 110.0
    assert "end" not in _kinds(course)


def test_one_seed_gives_the_same_times_again_and_one_die_does_not_move_another() -> None:
    claimed = _claim()
    plain, again = (RandomModel(Simulation.of(run_s="exponential:5", seed=4)) for _ in range(2))
    slow_boot = RandomModel(Simulation.of(run_s="exponential:5", boot_s="uniform:1,9", seed=4))
    other = RandomModel(Simulation.of(run_s="exponential:5", seed=5))
    slow_boot.draw("boot_s")
    times = [
        [random_model.course(claimed, 0.0)[0].at for _ in range(20)]
        for random_model in (plain, again, slow_boot, other)
    ]
    assert times[0] == times[1] == times[2]
    assert times[0] != times[3]
