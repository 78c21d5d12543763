"""Defines enumerations shared by the command line and the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

LIMIT_KINDS: Mapping[str, str] = {
    "environment_starts": "environments being created at once on a host",
    "image_builds": "image builds and pulls at once on a host",
    "image_pulls": "pulls at once from a registry, by all hosts",
    "model_requests:user": "model calls per minute of a user",
    "model_requests:run": "model calls per minute of a run",
    "model_requests:model": "model calls per minute to a model",
    "model_tokens:user": "tokens per minute of a user",
    "model_tokens:run": "tokens per minute of a run",
    "model_tokens:model": "tokens per minute of a model",
    "model_concurrency:user": "model calls at once of a user",
    "model_concurrency:run": "model calls at once of a run",
    "model_concurrency:model": "model calls at once to a model",
}
"""Kinds of limits that can be set, with the meaning of their number."""

UsageBy = Literal["task", "run", "user", "agent", "model"]
"""Keys by which usage is summed."""


class Purpose(StrEnum):
    """Purpose of a run."""

    EVALUATION = "evaluation"
    TRAINING = "training"  # inference servers return token ids; attempts become samples for a trainer
    SYNTHESIS = "synthesis"  # good trajectories are stored, once each, for supervised training
