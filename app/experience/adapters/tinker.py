"""Converts samples for Tinker's `Datum`, which SkyRL's server accepts, too.

Source: tinker 0.38, types/datum.py, which refuses lists of other names; inputs are shifted by one against targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.experience.adapters.rows import Row, scored


def data(rows: Sequence[Row], clip: tuple[float, float] | None = None) -> list[dict[str, Any]]:
    """Returns `model_input` (token ids) and `loss_fn_inputs` of a Datum for each row.

    clip: for the loss `gspo`, limits of a sequence's ratio below and above 1, such as (3e-4, 4e-4); adds the mask of
    the ratio's tokens. Other losses get their limits with the call. Raises: SampleRefused.
    """
    return [_datum(row, advantage, clip) for row, advantage in scored(rows)]


def _datum(row: Row, advantage: float, clip: tuple[float, float] | None) -> dict[str, Any]:
    own = [float(one) for one in row["mask"][1:]]
    of_sequence: dict[str, list[float]] = {}
    if clip is not None:
        of_sequence = {
            "clip_low_threshold": [1.0 - clip[0]] * len(own),
            "clip_high_threshold": [1.0 + clip[1]] * len(own),
            "sequence_ratio_mask": own,
        }
    return {
        "model_input": list(row["token_ids"][:-1]),
        "loss_fn_inputs": {
            "target_tokens": list(row["token_ids"][1:]),
            "logprobs": list(row["logprobs"][1:]),
            "advantages": [advantage * one for one in own],
            **of_sequence,
        },
    }
