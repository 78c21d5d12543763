"""Converts samples for TRL's GRPOTrainer: the result of its `rollout_func`, one entry for each generation.

Source: trl 1.16, trainer/grpo_trainer.py: `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` (0: not the policy's),
and further keys for reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.experience.adapters.rows import Row, attempts_for, split


def record(row: Row) -> dict[str, Any]:
    """Converts one sample. Raises: SampleRefused."""
    parts = split(row)
    return {
        "prompt_ids": parts.prompt_ids,
        "completion_ids": parts.completion_ids,
        "logprobs": parts.logprobs,
        "env_mask": [int(own) for own in parts.mask],
        "reward": float(row["reward"]),
    }


def rollouts(prompts: Sequence[str], rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Returns a sample for each of a step's prompts, which are names of tasks, each repeated for each generation.

    Only an attempt's first sample is used: GRPOTrainer has one sequence for a generation. If a task has fewer attempts
    than its prompt has generations, its last attempt is used again, with no token of its own and the reward None, which
    GRPOTrainer leaves out.

    Raises: SampleRefused: a task without samples.
    """
    chosen: list[dict[str, Any]] = []
    for samples, own in attempts_for(prompts, rows):
        one = record(samples[0])
        chosen.append(one if own else one | {"env_mask": [0] * len(one["env_mask"]), "reward": None})
    return {name: [one[name] for one in chosen] for name in chosen[0]} if chosen else {}
