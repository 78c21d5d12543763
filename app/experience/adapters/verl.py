"""Samples as verl reads them: fields of `AgentLoopOutput`, and columns of its batches.

Source: verl 0.9.1, experimental/agent_loop/agent_loop.py, class AgentLoopOutput.
"""

from __future__ import annotations

from typing import Any

from app.experience.adapters.rows import Row, split


def agent_loop_output(row: Row) -> dict[str, Any]:
    """Arguments of `AgentLoopOutput`. Raises: SampleRefused."""
    parts = split(row)
    mask = [int(own) for own in parts.mask]
    versions = [span["version"] for span in row["versions"]]
    return {
        "prompt_ids": parts.prompt_ids,
        "response_ids": parts.completion_ids,
        "response_mask": mask,
        "response_logprobs": parts.logprobs,
        "reward_score": float(row["reward"]),
        "num_turns": sum(own and not before for before, own in zip([0, *mask], mask, strict=False)),
        "metrics": {},
        "extra_fields": {"uid": row["group_id"], "attempt_id": row["attempt_id"], "versions": versions},
    }


def record(row: Row) -> dict[str, Any]:
    """One row of a batch. Raises: SampleRefused."""
    parts = split(row)
    return {
        "uid": row["group_id"],
        "prompts": parts.prompt_ids,
        "responses": parts.completion_ids,
        "response_mask": [int(own) for own in parts.mask],
        "rollout_log_probs": parts.logprobs,
        "reward": float(row["reward"]),
    }
