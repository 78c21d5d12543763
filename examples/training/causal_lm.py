"""The model of paper.yaml: one of `transformers` from the folder that POLICY_WEIGHTS names."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def policy() -> torch.nn.Module:
    """Token ids (sequences × tokens) to logits; its weights have the names that engines know."""
    folder = Path(os.environ["POLICY_WEIGHTS"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    forward = model.forward
    model.forward = lambda token_ids: forward(input_ids=token_ids, use_cache=False).logits
    model.files = folder
    return model
