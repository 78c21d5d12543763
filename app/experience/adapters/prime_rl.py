"""Samples as prime-rl reads them: the fields of its `TrainingSample`, flat, without a prompt apart.

Source: prime-rl 0.8, transports/types.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.experience.adapters.rows import Row, advantages, by_group


def training_samples(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All rows with the advantages of their groups. Raises: SampleRefused."""
    return [
        _record(row, advantage)
        for group in by_group(rows).values()
        for row, advantage in zip(group, advantages(group), strict=True)
    ]


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
