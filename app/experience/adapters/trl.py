"""Samples as TRL's GRPOTrainer reads them: what its `rollout_func` returns, one entry for each sample.

Source: trl 1.16, trainer/grpo_trainer.py: `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` (0: not the policy's),
and further keys for reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def rollouts(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """All samples by key. `reward` reaches the trainer's reward functions as it is. Raises: SampleRefused."""
    records = [record(row) for row in rows]
    return {name: [one[name] for one in records] for name in records[0]} if records else {}
