"""What oracle, nop and cheat say of a task: valid, built, or quarantined with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from app.evaluation.validation import ValidationTrial, candidate, judged, leaking, unvalidated_note
from app.ledger.validations import TaskIdentity
from app.models.endings import EndReason
from app.models.outcome import AttemptRecord, Failure, TestStatus, Verdict
from app.models.spec import AgentTask, EnvironmentSpec, Limits, Mode, Network, TestsGoal
from app.models.states import AttemptState
from app.models.validation import Validation, ValidationState, content_of
from tests.building import a_result, new_id

TASK = TaskIdentity("c" * 64, "own", "a__b-1", "example.org/image:1")
AGENTS = ("oracle", "nop", "cheat")
IMAGE = "sha256:1"


def trial(
    agent: str,
    reward: float | None,
    *,
    image: str = IMAGE,
    tests: dict[str, TestStatus] | None = None,
    error: str = "",
    end: EndReason = EndReason.SUBMITTED,
    suspect: str = "",
) -> ValidationTrial:
    verdict = None if reward is None else Verdict(reward=reward, counts=True, tests=tests or {}, suspect=suspect)
    failure = Failure(error=error, message="said so") if error else None
    attempt = AttemptRecord(
        id=new_id(),
        number=1,
        state=AttemptState.FINISHED,
        mode=Mode.EPHEMERAL,
        environment={"image_id": image} if image else {},
        failure=failure,
        verdict=verdict,
    )
    return ValidationTrial(agent, a_result(agent=agent, end_reason=end, verdict=verdict, attempts=(attempt,)))


def of(oracle: list[float | None], nop: list[float | None], cheat: list[float | None], **how: Any) -> Validation:
    given = zip(AGENTS, (oracle, nop, cheat), strict=True)
    return by([trial(agent, one, **how) for agent, all_ in given for one in all_], len(oracle))


def by(trials: list[ValidationTrial], times: int = 1) -> Validation:
    (found,) = judged(TASK, trials, times=times, agents=AGENTS, runs=["r"])
    return found


def test_a_task_is_valid_on_an_image_when_oracle_gets_one_and_nop_and_cheat_zero_each_time() -> None:
    found = of([1, 1, 1], [0, 0, 0], [0, 0, 0])
    assert (found.state, found.reason, found.image_id) == (ValidationState.VALID, "", IMAGE)
    assert found.rewards == {"oracle": (1, 1, 1), "nop": (0, 0, 0), "cheat": (0, 0, 0)}


@pytest.mark.parametrize(
    ("oracle", "nop", "cheat", "reason"),
    [
        ([0, 0], [0, 0], [0, 0], "oracle 0"),
        ([0.5, 0.5], [0, 0], [0, 0], "oracle 0.5"),
        ([1, 1], [1, 1], [0, 0], "nop 1"),
        ([1, 1], [0.2, 0.2], [0, 0], "nop 0.2"),
        ([1, 1], [0, 0], [1, 1], "cheat 1"),
        ([1, 0], [0, 0], [0, 0], "flaky: oracle 1, 0"),
        ([1, 1], [0, 0], [0, 1], "flaky: cheat 0, 1"),
        ([0, 0], [1, 1], [0, 0], "oracle 0; nop 1"),
    ],
)
def test_what_does_not_do_as_expected_is_quarantined_with_the_reason(
    oracle: list[float | None], nop: list[float | None], cheat: list[float | None], reason: str
) -> None:
    found = of(oracle, nop, cheat)
    assert (found.state, found.reason) == (ValidationState.QUARANTINED, reason)


def test_a_flaky_task_names_the_tests_that_flipped() -> None:
    passed, failed = {"t::a": TestStatus.PASSED, "t::b": TestStatus.PASSED}, {"t::a": TestStatus.FAILED}
    trials = [trial("oracle", 1, tests=passed), trial("oracle", 0, tests=passed | failed), trial("nop", 0)]
    found = by([*trials, trial("cheat", 0)])
    assert found.reason == "flaky: oracle 1, 0; tests that flipped: t::a"
    assert found.flipped == ("t::a",)


def test_tests_that_flip_under_one_reward_are_flaky_too_but_not_under_an_attack() -> None:
    passed, failed = {"t::a": TestStatus.PASSED}, {"t::a": TestStatus.ERROR}
    whole = [trial("oracle", 1), trial("oracle", 1), trial("cheat", 0), trial("cheat", 0)]
    nops = [trial("nop", 0, tests=passed), trial("nop", 0, tests=failed)]
    found = by([*whole, *nops], 2)
    assert (found.state, found.reason) == (ValidationState.QUARANTINED, "flaky: tests that flipped: t::a")
    cheats = [trial("cheat", 0, tests=passed), trial("cheat", 0, tests=failed)]
    honest = [trial("oracle", 1), trial("oracle", 1), trial("nop", 0), trial("nop", 0)]
    assert by([*honest, *cheats], 2).state is ValidationState.VALID


def test_an_image_that_cannot_be_built_is_quarantined_without_an_image() -> None:
    found = of([None], [None], [None], image="", error="ImageBuildFailed", end=EndReason.ENVIRONMENT_ERROR)
    assert (found.state, found.image_id) == (ValidationState.QUARANTINED, "")
    assert found.reason.startswith("not scored: the image could not be built (oracle: said so)")


@pytest.mark.parametrize("end", [EndReason.LOST, EndReason.CANCELLED])
def test_what_is_no_fault_of_the_task_leaves_it_built_and_no_verdict(end: EndReason) -> None:
    trials = [trial("oracle", None, error="EngineUnavailable", end=end), trial("nop", 0), trial("cheat", 0)]
    found = by(trials)
    assert found.state is ValidationState.BUILT
    assert "oracle was scored 0 of 1 times; EngineUnavailable" in found.reason


def test_a_task_that_never_had_an_environment_stays_a_candidate() -> None:
    found = of([None], [None], [None], image="", error="EngineUnavailable", end=EndReason.INFRASTRUCTURE)
    assert found.state is ValidationState.CANDIDATE


def test_each_image_is_judged_by_what_ran_on_it() -> None:
    first = [trial(agent, reward) for agent, reward in (("oracle", 1), ("nop", 0), ("cheat", 0))]
    other = [trial("oracle", 0, image="sha256:2")]
    one, two = judged(TASK, [*first, *other], times=1, agents=AGENTS, runs=[])
    assert (one.image_id, one.state) == (IMAGE, ValidationState.VALID)
    assert (two.image_id, two.state, two.reason) == ("sha256:2", ValidationState.QUARANTINED, "oracle 0")


def test_a_suspect_cheat_is_as_good_as_a_cheat_with_zero_and_a_suspect_oracle_is_not() -> None:
    honest = [trial("oracle", 1), trial("nop", 0)]
    assert by([*honest, trial("cheat", 0, suspect="a rule")]).state is ValidationState.VALID
    doubted = by([trial("oracle", 0, suspect="a rule"), trial("nop", 0), trial("cheat", 0)])
    assert doubted.reason == "oracle 0, suspect: a rule"


def test_the_gold_text_in_the_image_quarantines_and_another_finding_does_not() -> None:
    valid = of([1], [0], [0])
    kept = leaking(valid, ["commits: .git: 2 after the base"], gold=False)
    assert (kept.state, kept.findings) == (ValidationState.VALID, ("commits: .git: 2 after the base",))
    leaked = leaking(valid, ["gold: /x: 3 of 3 of its lines"], gold=True)
    assert leaked.state is ValidationState.QUARANTINED
    assert leaked.reason == "the image holds the gold solution: gold: /x: 3 of 3 of its lines"


def test_a_score_says_how_many_of_its_images_were_not_validated() -> None:
    assert unvalidated_note([ValidationState.VALID] * 2) == ""
    assert unvalidated_note([]) == ""
    mixed = unvalidated_note([ValidationState.VALID, None, ValidationState.BUILT, ValidationState.QUARANTINED])
    assert "2 of 4 scored tasks are on images that were not validated" in mixed
    assert "1 of 4 scored tasks are quarantined" in mixed


def test_limits_and_network_are_no_part_of_what_is_validated_and_the_tests_are() -> None:
    goal = TestsGoal(base_commit="HEAD", test_command="pytest -rA", fail_to_pass=("t.py::t",), pass_to_pass=())
    task = AgentTask(name="a", description="d", environment=EnvironmentSpec(image="i:1"), goal=goal)
    environment = task.environment.model_copy(update={"network": Network.OPEN})
    wider = task.model_copy(update={"limits": Limits(agent_timeout_s=5), "environment": environment})
    other = task.model_copy(update={"goal": goal.model_copy(update={"test_command": "pytest -rA -x"})})
    first = content_of(task.model_dump(mode="json"))
    assert content_of(wider.model_dump(mode="json")) == first
    assert content_of(other.model_dump(mode="json")) != first


def test_a_candidate_knows_its_runs_and_no_image() -> None:
    found = candidate(TASK, ["r1"])
    assert (found.state, found.image_id, found.runs) == (ValidationState.CANDIDATE, "", ("r1",))
