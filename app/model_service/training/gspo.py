"""Defines the loss of group sequence policy optimisation.

Source: Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, equations 5 to 7.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GspoLoss(NamedTuple):
    """`loss` is a scalar with a gradient; the others are plain numbers, over the sequences of the minibatch."""

    loss: Tensor
    clipped: float  # share of sequences whose ratio was cut
    ratio: float  # mean of the sequence ratios
    gap: float  # greatest difference of a token's log-probability to the recorded one


def gspo_loss(
    logprobs: Tensor,
    recorded: Tensor,
    mask: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> GspoLoss:
    """Computes the clipped loss on sequence ratios.

    logprobs, recorded: float, sequences × tokens, of the tokens as the policy scores them now and as they were
    sampled. mask: bool, the same shape, True on the policy's own tokens, at least one in each sequence. advantages:
    float, one for each sequence. weights: the same; the loss is their weighted sum (None: the mean). The ratio is the
    geometric mean over a sequence's own tokens; it is clipped between 1 - clip_low and 1 + clip_high.
    """
    own = mask.to(logprobs.dtype)
    difference = (logprobs - recorded) * own
    ratio = torch.exp(difference.sum(-1) / own.sum(-1))
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = -torch.minimum(ratio * advantages, clipped * advantages)
    loss = terms.mean() if weights is None else (terms * weights).sum()
    with torch.no_grad():
        return GspoLoss(
            loss,
            clipped=float((ratio != clipped).float().mean()),
            ratio=float(ratio.mean()),
            gap=float(difference.abs().max()),
        )
