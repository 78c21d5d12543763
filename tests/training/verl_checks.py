"""The loss and an agent loop's output beside verl's; `test_trainer.py` runs it by pytest in .venv-verl."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any, Optional

import pydantic
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_gspo
from verl.workers.config import ActorConfig

from app.experience.adapters import verl
from app.model_service.training.gspo import gspo_loss
from tests.unit.test_trainer_adapters import a_row


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


def _agent_loop_output() -> Any:
    """verl's class, cut out of its file, whose other imports need packages that are not here."""
    package = importlib.util.find_spec("verl")
    assert package is not None
    assert package.origin is not None
    tree = ast.parse((Path(package.origin).parent / "experimental/agent_loop/agent_loop.py").read_text())
    names = ("AgentLoopMetrics", "AgentLoopOutput")
    classes: list[ast.stmt] = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name in names]
    assert len(classes) == 2
    space = {"torch": torch, "BaseModel": pydantic.BaseModel, "Any": Any, "Optional": Optional}
    exec(compile(ast.Module(classes, []), "agent_loop.py", "exec", dont_inherit=True), space)
    return space["AgentLoopOutput"]


def test_what_an_agent_loop_returns_is_read_by_verls_own_class() -> None:
    given = verl.agent_loop_output(a_row())
    output = _agent_loop_output()
    assert given.keys() <= output.model_fields.keys()
    found = output.model_validate(given, strict=True).as_dict()
    assert found["prompts"].tolist() == given["prompt_ids"]
    assert found["responses"].tolist() == given["response_ids"]
    assert found["response_mask"].tolist() == given["response_mask"]
    assert found["rollout_log_probs"].tolist() == given["response_logprobs"]
    assert found["rm_scores"].tolist() == [0.0, 0.0, 1.0]
    assert found["num_turns"] == 4
    for name in ("min_global_steps", "max_global_steps"):  # trainer/ppo/v1/agent_loop_tq.py makes tags of these
        assert isinstance(found["extra_fields"].get(name), int)
