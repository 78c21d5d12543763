"""Rewards that a run gives to ends, whatever the tests say."""

from __future__ import annotations

import pytest

from app.agents.external import known_agents
from app.cli.submission_options import rewards_of
from app.errors import SpecInvalid
from app.models.endings import EndReason, reward_by_rule
from app.models.outcome import Verdict
from app.settings import Settings
from app.submission import specs_for
from tests.building import a_task


def specs(**rewards: float) -> list[dict[str, float]]:
    made = specs_for([a_task()], agent="nop", mode="auto", model=None, agents=known_agents(Settings()), rewards=rewards)
    return [spec.rewards for spec in made]


def test_an_ends_own_rule_goes_before_the_one_of_not_submitted() -> None:
    rules = {"not_submitted": -0.5, "context_exhausted": 0.25}
    assert reward_by_rule(rules, EndReason.STEP_LIMIT) == -0.5
    assert reward_by_rule(rules, EndReason.CONTEXT_EXHAUSTED) == 0.25
    assert reward_by_rule(rules, EndReason.SUBMITTED) is None


def test_the_tests_own_reward_is_kept_beside_the_rules() -> None:
    ruled = Verdict(reward=1.0, counts=True, detail="all passed").ruled(-0.5)
    assert (ruled.reward, ruled.metrics["graded_reward"]) == (-0.5, 1.0)
    assert "rule gives -0.5" in ruled.detail


def test_a_rule_raises_no_suspect_verdict_and_changes_nothing_of_an_unscored_one() -> None:
    suspect = Verdict(reward=1.0, counts=True).suspected("hooks")
    assert suspect.ruled(0.5) == suspect
    ruled = suspect.ruled(-1.0)
    assert (ruled.reward, ruled.suspect, ruled.claimed_reward) == (-1.0, "hooks", 1.0)
    unscored = Verdict(reward=None, counts=False)
    assert unscored.ruled(0.5) == unscored


def test_rules_are_part_of_the_specs_and_in_order() -> None:
    assert specs(step_limit=-0.5, not_submitted=-1.0) == [{"not_submitted": -1.0, "step_limit": -0.5}]


@pytest.mark.parametrize("rewards", [{"tired": 1.0}, {"lost": 1.0}, {"step_limit": float("nan")}, {"step_limit": 1e9}])
def test_other_ends_and_numbers_are_refused(rewards: dict[str, float]) -> None:
    with pytest.raises(SpecInvalid, match=r"rewards: .*nothing was submitted"):
        specs(**rewards)


@pytest.mark.parametrize("given", [["step_limit"], ["step_limit=much"], ["a=1", "a=2"]])
def test_options_without_a_number_are_refused(given: list[str]) -> None:
    with pytest.raises(SpecInvalid, match="--reward: expected END=NUMBER"):
        rewards_of(given)
    assert rewards_of(["not_submitted=-0.5"]) == {"not_submitted": -0.5}


def test_a_suspect_verdict_has_no_reward_and_keeps_what_it_claimed() -> None:
    suspect = Verdict(reward=1.0, counts=True).suspected("hooks of the test runner")
    assert (suspect.reward, suspect.claimed_reward, suspect.suspect) == (0.0, 1.0, "hooks of the test runner")
    assert Verdict(reward=-0.5, counts=True).suspected("hooks").reward == -0.5
    assert not suspect.resolved
