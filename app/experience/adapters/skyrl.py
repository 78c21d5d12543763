"""Samples as SkyRL's generators give them: the fields of `GeneratorOutput`.

Source: skyrl 0.3.0, train/generators/base.py, `GeneratorInterface.generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.experience.adapters.rows import Row, attempts_for, split


def generator_output(trajectory_ids: Sequence[Any], rows: Sequence[Row], *, step_wise: bool = False) -> dict[str, Any]:
    """What `generate` returns for its input's `trajectory_ids`, whose `instance_id` is the name of a task.

    step_wise: all samples of an attempt, as steps of one trajectory, which SkyRL then has to be set to; else its first
    alone. Where a task has fewer attempts than trajectories, its last one stands in with no token of its own.

    Raises: SampleRefused: a task without samples.
    """
    found: dict[str, list[Any]] = {name: [] for name in _LISTS}
    for trajectory, (samples, own) in zip(
        trajectory_ids, attempts_for([one.instance_id for one in trajectory_ids], rows), strict=True
    ):
        steps = samples if step_wise else samples[:1]
        for number, row in enumerate(steps):
            parts, is_last = split(row), number == len(steps) - 1
            found["prompt_token_ids"].append(parts.prompt_ids)
            found["response_ids"].append(parts.completion_ids)
            found["rewards"].append(float(row["reward"]) if own and is_last else 0.0)
            found["loss_masks"].append([int(mine and own) for mine in parts.mask])
            found["stop_reasons"].append(row["end_reason"])
            found["rollout_logprobs"].append(parts.logprobs)
            found["trajectory_ids"].append(trajectory)
            found["is_last_step"].append(is_last)
    return found | {"rollout_metrics": None, **({} if step_wise else {"is_last_step": None})}


_LISTS = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_logprobs",
    "trajectory_ids",
    "is_last_step",
)
