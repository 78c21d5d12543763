"""Samples as trainers read them: fields, shapes and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from app.errors import SampleRefused
from app.experience.adapters import prime_rl, skyrl, tinker, trl, verl


def a_row(attempt: str = "a", reward: float | None = 1.0, **values: Any) -> dict[str, Any]:
    given = {
        "group_id": "g",
        "attempt_id": attempt,
        "task": "box",
        "token_ids": [1, 2, 3, 4, 5],
        "mask": [False, False, True, False, True],
        "logprobs": [0.0, 0.0, -0.5, 0.0, -0.25],
        "temperature": 1.0,
        "versions": [{"version": "v1", "start": 2, "end": 3}, {"version": "v2", "start": 4, "end": 5}],
        "reward": reward,
        "end_reason": "submitted",
    }
    return given | values


ROWS = [a_row("a", 1.0), a_row("b", 0.0)]


def test_trl_gets_prompt_and_completion_with_the_tools_masked() -> None:
    assert trl.record(a_row()) == {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5],
        "logprobs": [-0.5, 0.0, -0.25],
        "env_mask": [1, 0, 1],
        "reward": 1.0,
    }


def test_trl_gets_an_attempt_for_each_generation_and_a_masked_one_for_what_was_lost() -> None:
    again = a_row("a", 1.0, token_ids=[1, 2, 9], mask=[False, False, True], logprobs=[0.0, 0.0, -1.0])
    found = trl.rollouts(["box", "box", "box"], [ROWS[0], again, ROWS[1]])
    assert found["reward"] == [1.0, 0.0, None]
    assert found["env_mask"] == [[1, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert found["completion_ids"] == [[3, 4, 5]] * 3
    with pytest.raises(SampleRefused, match="lid"):
        trl.rollouts(["box", "lid"], ROWS)
    assert trl.rollouts([], ROWS) == {}


def test_verl_gets_the_output_of_an_agent_loop() -> None:
    found = verl.agent_loop_output(a_row())
    assert (found["prompt_ids"], found["response_ids"], found["response_mask"]) == ([1, 2], [3, 4, 5], [1, 0, 1])
    assert (found["reward_score"], found["num_turns"]) == (1.0, 4), "the prompt, an answer, a tool, an answer"
    about = found["extra_fields"]
    assert (about["versions"], about["min_global_steps"], about["max_global_steps"]) == (["v1", "v2"], 1, 2)
    spans = [{"version": "paper-10.1", "start": 2, "end": 5}, {"version": "paper-9", "start": 5, "end": 6}]
    about = verl.agent_loop_output(a_row(versions=spans))["extra_fields"]
    assert (about["min_global_steps"], about["max_global_steps"]) == (9, 10)
    assert "min_global_steps" not in verl.agent_loop_output(a_row(versions=[]))["extra_fields"]
    named = a_row(versions=[{"version": "night", "start": 2, "end": 5}])
    assert verl.agent_loop_output(named, {"night": 7}.__getitem__)["extra_fields"]["max_global_steps"] == 7
    with pytest.raises(SampleRefused, match="ends with verl's global step, such as 'v8'; found 'night'"):
        verl.agent_loop_output(named)


def test_prime_rl_gets_flat_samples_with_advantages_on_the_policys_tokens() -> None:
    first, second = prime_rl.training_samples(ROWS)
    assert first["advantages"] == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert second["advantages"] == [0.0, 0.0, -1.0, 0.0, -1.0]
    assert (first["token_ids"], first["temperatures"]) == ([1, 2, 3, 4, 5], [1.0] * 5)


def test_tinker_gets_targets_shifted_by_one() -> None:
    first, _ = tinker.data(ROWS)
    assert first["model_input"] == [1, 2, 3, 4]
    assert first["loss_fn_inputs"] == {
        "target_tokens": [2, 3, 4, 5],
        "logprobs": [0.0, -0.5, 0.0, -0.25],
        "advantages": [0.0, 1.0, 0.0, 1.0],
    }
    _, second = tinker.data(ROWS, clip=(3e-4, 4e-4))
    assert second["loss_fn_inputs"] == {
        "target_tokens": [2, 3, 4, 5],
        "logprobs": [0.0, -0.5, 0.0, -0.25],
        "advantages": [0.0, -1.0, 0.0, -1.0],
        "clip_low_threshold": [0.9997] * 4,
        "clip_high_threshold": [1.0004] * 4,
        "sequence_ratio_mask": [0.0, 1.0, 0.0, 1.0],
    }


@dataclass(frozen=True)
class TrajectoryID:
    """As skyrl 0.3.0 has it."""

    instance_id: str
    repetition_id: int


def test_skyrl_gets_a_trajectory_for_each_id_in_its_order_and_a_masked_one_for_what_was_lost() -> None:
    lid = a_row("c", 0.5, task="lid", end_reason="context_exhausted")
    ids = [TrajectoryID("box", 0), TrajectoryID("lid", 0), TrajectoryID("box", 1), TrajectoryID("box", 2)]
    found = skyrl.generator_output(ids, [lid, *ROWS])
    assert found["prompt_token_ids"] == [[1, 2]] * 4
    assert found["response_ids"] == [[3, 4, 5]] * 4
    assert found["rewards"] == [1.0, 0.5, 0.0, 0.0]
    assert found["loss_masks"] == [[1, 0, 1], [1, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert found["stop_reasons"] == ["submitted", "context_exhausted", "submitted", "submitted"]
    assert found["rollout_logprobs"] == [[-0.5, 0.0, -0.25]] * 4
    assert (found["trajectory_ids"], found["is_last_step"], found["rollout_metrics"]) == (ids, None, None)


def test_skyrl_step_wise_gets_all_samples_of_an_attempt_with_the_reward_at_the_last() -> None:
    ids = [TrajectoryID("box", 0), TrajectoryID("box", 1)]
    found = skyrl.generator_output(ids, [ROWS[1], a_row("a"), a_row("a")], step_wise=True)
    assert found["trajectory_ids"] == [ids[0], ids[1], ids[1]]
    assert (found["rewards"], found["is_last_step"]) == ([0.0, 0.0, 1.0], [True, False, True])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"token_ids": []}, "found none"),
        ({"mask": [True]}, "for each of 5 ids"),
        ({"logprobs": [0.0, 0.0, math.nan, 0.0, 0.0]}, "finite `logprobs`"),
        ({"reward": None}, "finite `reward`"),
        ({"reward": math.inf}, "finite `reward`"),
        ({"mask": [True, False, False, False, False]}, "after the first"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_refused(values: dict[str, Any], words: str) -> None:
    for adapter in (
        trl.record,
        verl.record,
        lambda row: tinker.data([row]),
        lambda row: prime_rl.training_samples([row]),
        lambda row: skyrl.generator_output([TrajectoryID("box", 0)], [row]),
    ):
        with pytest.raises(SampleRefused, match=words):
            adapter(a_row(**values))
