"""Converts samples for SkyRL's generators: the fields of `GeneratorOutput`.

Source: skyrl 0.3.0, train/generators/base.py, `GeneratorInterface.generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.experience.adapters.rows import Row, attempts_for, split


def generator_output(trajectory_ids: Sequence[Any], rows: Sequence[Row], *, step_wise: bool = False) -> dict[str, Any]:
    """Returns the result of `generate` for its input's `trajectory_ids`, whose `instance_id` is the name of a task.

    step_wise: all samples of an attempt, as steps of one trajectory, for which SkyRL must be configured; else only the
    first. If a task has fewer attempts than trajectories, its last attempt is used again, with no token of its own.

    Raises: SampleRefused: a task without samples.
    """
    columns: dict[str, list[Any]] = {name: [] for name in _LISTS}
    for trajectory, (samples, own) in zip(
        trajectory_ids, attempts_for([one.instance_id for one in trajectory_ids], rows), strict=True
    ):
        steps = samples if step_wise else samples[:1]
        for number, row in enumerate(steps):
            parts, is_last = split(row), number == len(steps) - 1
            columns["prompt_token_ids"].append(parts.prompt_ids)
            columns["response_ids"].append(parts.completion_ids)
            columns["rewards"].append(float(row["reward"]) if own and is_last else 0.0)
            columns["loss_masks"].append([int(token and own) for token in parts.mask])
            columns["stop_reasons"].append(row["end_reason"])
            columns["rollout_logprobs"].append(parts.logprobs)
            columns["trajectory_ids"].append(trajectory)
            columns["is_last_step"].append(is_last)
    return columns | {"rollout_metrics": None, **({} if step_wise else {"is_last_step": None})}


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
