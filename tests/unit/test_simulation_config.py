"""What a simulation is told: distributions, chances, and what is refused."""

from __future__ import annotations

import json
import random
import statistics

import pytest

from app.errors import SpecInvalid
from app.models.simulation import Distribution, Simulation


@pytest.mark.parametrize("text", ["constant:5", "uniform:1,10", "exponential:30", "lognormal:60,0.5", "any_of:2,3,50"])
def test_a_distribution_is_written_as_it_is_read_and_has_the_mean_that_it_says(text: str) -> None:
    spread = Distribution.parse(text)
    random_model = random.Random(7)
    drawn = [spread.draw(random_model) for _ in range(20_000)]
    assert str(spread) == text
    assert min(drawn) >= 0
    assert statistics.fmean(drawn) == pytest.approx(spread.mean_s, rel=0.03)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "constant",
        "constant:",
        "constant:x",
        "constant:1,2",
        "uniform:1",
        "gamma:1,2",
        "lognormal:60",
        "any_of:",
    ],
)
def test_what_is_no_distribution_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(ValueError, match=r"lognormal:60,0\.5"):
        Distribution.parse(text)


@pytest.mark.parametrize(
    "text", ["constant:-1", "constant:nan", "constant:inf", "uniform:5,1", "exponential:0", "lognormal:0,1"]
)
def test_numbers_that_no_duration_can_have_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Distribution.parse(text)


def test_a_simulation_travels_as_json() -> None:
    sent = Simulation.of(run_s="lognormal:60,0.5", boot_s="uniform:1,10", crash=0.1, seed=3)
    wire = json.dumps(sent.model_dump(mode="json"))
    assert "lognormal:60,0.5" in wire
    assert Simulation.of(**json.loads(wire)) == sent


@pytest.mark.parametrize(
    "values",
    [{"crash": 1.5}, {"reply_lost": -0.1}, {"crash": 0.6, "vanish": 0.6}, {"boot_failure": 1, "never_registers": 1}],
)
def test_chances_must_be_chances_and_fates_exclude_each_other(values: dict[str, float]) -> None:
    with pytest.raises(SpecInvalid, match=next(iter(values))):
        Simulation.of(**values)


@pytest.mark.parametrize("values", [{"crsh": 0.1}, {"run_s": "soon"}, {"boot_s": 3}])
def test_what_a_simulation_does_not_know_is_refused_by_name(values: dict[str, object]) -> None:
    with pytest.raises(SpecInvalid, match=next(iter(values))):
        Simulation.of(**values)
