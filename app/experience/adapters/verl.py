"""Converts samples for verl: fields of `AgentLoopOutput`, and columns of its batches.

Source: verl 0.9.1, experimental/agent_loop/agent_loop.py, class AgentLoopOutput.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from app.errors import SampleRefused
from app.experience.adapters.rows import Row, split

_STEP = re.compile(r"([0-9]+)(\.[0-9]+)?$")


def step_in(version: str) -> int:
    """Returns the number that ends a version: 8 of `v8`, 3 of `NAME-3` and `NAME-3.1`. Raises: SampleRefused: none."""
    match = _STEP.search(version)
    if match is None:
        raise SampleRefused(
            f"expected a version that ends with verl's global step, such as 'v8'; found {version!r}; give `step_of`"
        )
    return int(match[1])


def agent_loop_output(row: Row, step_of: Callable[[str], int] = step_in) -> dict[str, Any]:
    """Returns the arguments of `AgentLoopOutput`. step_of: verl's global step of a version. Raises: SampleRefused."""
    parts = split(row)
    mask = [int(own) for own in parts.mask]
    versions = [span["version"] for span in row["versions"]]
    steps = [step_of(version) for version in versions]
    about = {"uid": row["group_id"], "attempt_id": row["attempt_id"], "versions": versions}
    if steps:  # verl computes a trajectory's age from these
        about |= {"min_global_steps": min(steps), "max_global_steps": max(steps)}
    return {
        "prompt_ids": parts.prompt_ids,
        "response_ids": parts.completion_ids,
        "response_mask": mask,
        "response_logprobs": parts.logprobs,
        "reward_score": float(row["reward"]),
        "num_turns": 1 + sum(own != before for before, own in zip([0, *mask], mask, strict=False)),  # the prompt is one
        "metrics": {},
        "extra_fields": about,
    }


def record(row: Row) -> dict[str, Any]:
    """Returns one row of a batch. Raises: SampleRefused."""
    parts = split(row)
    return {
        "uid": row["group_id"],
        "prompts": parts.prompt_ids,
        "responses": parts.completion_ids,
        "response_mask": [int(own) for own in parts.mask],
        "rollout_log_probs": parts.logprobs,
        "reward": float(row["reward"]),
    }
