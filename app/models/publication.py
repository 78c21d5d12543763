"""A version of a policy on its way to a model's engines, as it crosses processes."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from app.models.spec import Wire

LEAST_PROBE = 32


class OnNewWeights(StrEnum):
    """What becomes of calls that are under way when the weights change; new ones wait."""

    FINISH = "finish"  # they end as they would; waited for where answers do not say which version wrote what
    DRAIN = "drain"  # they are waited for
    INTERRUPT = "interrupt"  # they are asked again with the new weights, unless their answer has begun to arrive


class ProbeSequence(Wire):
    """Token ids, and the log-probability of each after those before it; of the first there is none."""

    token_ids: list[int] = Field(min_length=LEAST_PROBE, max_length=32_768)
    logprobs: list[float | None]

    @model_validator(mode="after")
    def _each_token(self) -> ProbeSequence:
        told = [one for one in self.logprobs[1:] if one is not None]
        if len(self.logprobs) != len(self.token_ids) or len(told) < LEAST_PROBE - 1:
            raise ValueError(
                f"expected a log-probability for each of {len(self.token_ids)} tokens but the first (null), at least"
                f" {LEAST_PROBE - 1}; found {len(self.logprobs)} entries with {len(told)} of them"
            )
        if any(not math.isfinite(one) or one > 1e-3 for one in told):
            raise ValueError("expected finite log-probabilities of at most 0; found others")
        return self


class Publication(Wire):
    """One step of publishing: `quiet` the engines, or `load` and verify."""

    step: Literal["quiet", "load"]
    model: str
    version: str
    on_new_weights: OnNewWeights = OnNewWeights.FINISH
    weights: str | None = None  # a path at the engines; None: they have them already
    old_weights: str | None = None  # of the live version
    probe: ProbeSequence | None = None
    tolerance: float = Field(gt=0)


class WeightsReport(Wire):
    """What came of a step."""

    refused: str | None = None
    lost: tuple[str, ...] = ()  # engines that serve neither the new nor the old weights
