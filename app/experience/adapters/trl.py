"""Samples as TRL's GRPOTrainer reads them: what its `rollout_func` returns, one entry for each generation.

Source: trl 1.16, trainer/grpo_trainer.py: `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` (0: not the policy's),
and further keys for reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.errors import SampleRefused
from app.experience.adapters.rows import Row, split


def record(row: Row) -> dict[str, Any]:
    """One sample. Raises: SampleRefused."""
    parts = split(row)
    return {
        "prompt_ids": parts.prompt_ids,
        "completion_ids": parts.completion_ids,
        "logprobs": parts.logprobs,
        "env_mask": [int(own) for own in parts.mask],
        "reward": float(row["reward"]),
    }


def rollouts(prompts: Sequence[str], rows: Sequence[Row]) -> dict[str, list[Any]]:
    """A sample for each of a step's prompts, which are names of tasks, each as often as it has generations.

    Of an attempt its first sample is taken: GRPOTrainer knows one sequence for a generation. Where a task has fewer
    attempts than its prompt has generations, its last one stands in with no token of its own and the reward None, which
    GRPOTrainer leaves out.

    Raises: SampleRefused: a task without samples.
    """
    attempts: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found = attempts.setdefault(row["task"], {})
        if row["attempt_id"] not in found:
            found[row["attempt_id"]] = record(row)
    left = {task: list(found.values()) for task, found in attempts.items()}
    chosen: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    for prompt in prompts:
        if left.get(prompt):
            one = left[prompt].pop(0)
            last[prompt] = one | {"env_mask": [0] * len(one["env_mask"]), "reward": None}
        elif prompt in last:
            one = last[prompt]
        else:
            raise SampleRefused(f"expected samples of the task {prompt!r}, found samples of {sorted(attempts)[:5]}")
        chosen.append(one)
    return {name: [one[name] for one in chosen] for name in chosen[0]} if chosen else {}
