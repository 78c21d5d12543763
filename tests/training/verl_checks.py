"""The loss beside verl's, on the same numbers; `test_trainer.py` runs it by pytest in .venv-verl."""

from __future__ import annotations

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_gspo
from verl.workers.config import ActorConfig

from app.model_service.training.gspo import gspo_loss


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("low", "high", "apart"), [(3e-4, 4e-4, 3e-3), (0.2, 0.3, 2.0)])
def test_loss_and_gradient_are_those_of_verl(seed: int, low: float, high: float, apart: float) -> None:
    chance = torch.Generator().manual_seed(seed)
    recorded = -torch.rand(8, 40, generator=chance, dtype=torch.float64)
    mask = torch.rand(8, 40, generator=chance) < 0.6
    mask[:, 0] = True
    advantages = torch.randn(8, generator=chance, dtype=torch.float64)
    now = recorded + apart * torch.randn(8, 40, generator=chance, dtype=torch.float64)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=8,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
    )
    ours, theirs = (now.clone().requires_grad_() for _ in range(2))
    mine = gspo_loss(ours, recorded, mask, advantages, clip_low=low, clip_high=high)
    other, _ = compute_policy_loss_gspo(
        recorded,
        theirs,
        advantages[:, None].expand(8, 40),
        mask.double(),
        loss_agg_mode="seq-mean-token-mean",
        config=config,
    )
    mine.loss.backward()
    other.backward()
    assert 0 < mine.clipped < 1, "some sequences are cut, and some are not"
    assert abs(float(mine.loss.detach()) - float(other.detach())) < 1e-6
    assert ours.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
