"""The model of paper.yaml; `test_trainer.py` runs it by pytest in .venv-verl, which has transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from app.ledger import training
from app.ledger.database import Database
from app.settings import Settings
from app.training.config import checked_config, read_config
from app.training.trainers import ReferenceTrainer
from tests.training.trainer_checks import groups

PAPER = Path(__file__).parents[2] / "examples" / "training" / "paper.yaml"
TINY = Qwen3Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)


def test_the_papers_model_is_trained_and_written_as_engines_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    AutoModelForCausalLM.from_config(TINY).save_pretrained(first)
    monkeypatch.setenv("POLICY_WEIGHTS", str(first))
    asked = read_config(PAPER)
    how = {**asked.trainer.model_dump(), "folder": tmp_path / "kept", "learning_rate": 0.01}
    config = checked_config({**asked.model_dump(), "trainer": how}, "paper")
    monkeypatch.setattr(training, "run_of", lambda *_: None)
    trainer = ReferenceTrainer(config, Settings(home=tmp_path / "h"), Database("postgresql://none"), PAPER.parent)
    trainer.train(0, groups())
    ids = torch.tensor([[1, 2, 3, 4]])
    begun, trained = (
        AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
        for folder in (tmp_path / "kept" / config.name / step for step in ("step-0", "step-1"))
    )
    assert torch.allclose(begun, AutoModelForCausalLM.from_pretrained(first)(input_ids=ids).logits, atol=1e-6)
    assert torch.allclose(trained, trainer._trainer.model(ids), atol=1e-6)
    assert not torch.allclose(trained, begun, atol=1e-4)
