"""Converts samples for prime-rl: the fields of its `TrainingSample`, flat, without a separate prompt.

Source: prime-rl 0.8, `TrainingSample`, which msgspec writes as an array: `positional` has its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.experience.adapters.rows import Row, scored


def training_samples(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns all rows with the advantages of their groups. Raises: SampleRefused."""
    return [_record(row, advantage) for row, advantage in scored(rows)]


_ORDER = ("token_ids", "mask", "logprobs", "temperatures", "env_name")
_BETWEEN = 7
"""Number of fields before the advantages that samples of text lack: reference log-probabilities, images, weights."""


def positional(rows: Sequence[Row]) -> list[list[Any]]:
    """Returns the samples as arrays; `msgspec.msgpack` reads them as `list[TrainingSample]`. Raises: SampleRefused."""
    return [[*(one[name] for name in _ORDER), *[None] * _BETWEEN, one["advantages"]] for one in training_samples(rows)]


def _record(row: Row, advantage: float) -> dict[str, Any]:
    length = len(row["token_ids"])
    temperature = 1.0 if row["temperature"] is None else float(row["temperature"])
    return {
        "token_ids": list(row["token_ids"]),
        "mask": list(row["mask"]),
        "logprobs": list(row["logprobs"]),
        "temperatures": [temperature] * length,
        "env_name": row["task"],
        "advantages": [advantage if own else 0.0 for own in row["mask"]],
    }
