"""Defines the messages that publish a policy version to a model's inference servers."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from app.models.spec import Wire

LEAST_PROBE = 32


class OnNewWeights(StrEnum):
    """Treatment of running calls when the weights change; new calls wait."""

    FINISH = "finish"  # they run to their end; waited for if responses do not name the version of each token
    DRAIN = "drain"  # wait until they have ended
    INTERRUPT = "interrupt"  # repeat them with the new weights, unless the response has begun to arrive


class ProbeSequence(Wire):
    """Token ids, and each token's log-probability given the tokens before it; the first has none."""

    token_ids: list[Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]] = Field(
        min_length=LEAST_PROBE, max_length=32_768
    )
    logprobs: list[float | None]

    @model_validator(mode="after")
    def _each_token(self) -> ProbeSequence:
        numbers = [one for one in self.logprobs[1:] if one is not None]
        if len(self.logprobs) != len(self.token_ids) or len(numbers) < LEAST_PROBE - 1:
            raise ValueError(
                f"expected a log-probability for each of {len(self.token_ids)} tokens but the first (null), at least"
                f" {LEAST_PROBE - 1}; found {len(self.logprobs)} entries with {len(numbers)} of them"
            )
        if any(not math.isfinite(one) or one > 1e-3 for one in numbers):
            raise ValueError("expected finite log-probabilities of at most 0; found others")
        return self


class Publication(Wire):
    """A step of publishing: `quiet` the inference servers, or `load` and verify."""

    step: Literal["quiet", "load"]
    model: str
    version: str
    on_new_weights: OnNewWeights = OnNewWeights.FINISH
    weights: str | None = None  # a path on the inference servers; None: they have the weights already
    old_weights: str | None = None  # weights of the live version
    probe: ProbeSequence | None = None
    tolerance: float = Field(gt=0)


class WeightsReport(Wire):
    """Result of a publishing step."""

    refused: str | None = None
    lost: tuple[str, ...] = ()  # inference servers with neither the new nor the old weights
