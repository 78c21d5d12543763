"""Samples as Tinker's `Datum` reads them, which SkyRL's server takes, too.

Source: tinker 0.38, types/datum.py; inputs are shifted by one against targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.experience.adapters.rows import Row, advantages, by_group


def data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """`model_input` (token ids) and `loss_fn_inputs` of a Datum for each row. Raises: SampleRefused."""
    return [
        _datum(row, advantage)
        for group in by_group(rows).values()
        for row, advantage in zip(group, advantages(group), strict=True)
    ]


def _datum(row: Row, advantage: float) -> dict[str, Any]:
    own = [float(one) for one in row["mask"][1:]]
    return {
        "model_input": list(row["token_ids"][:-1]),
        "loss_fn_inputs": {
            "target_tokens": list(row["token_ids"][1:]),
            "logprobs": list(row["logprobs"][1:]),
            "advantages": [advantage * one for one in own],
            "mask": own,
        },
    }
