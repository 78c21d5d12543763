"""The tasks of `make train-demo`, trained on by TRL's GRPOTrainer (GSPO) instead of the reference trainer.

    sh scripts/train-environment trl && .venv-trl/bin/python -m bench.training.with_trl --steps 8

What a user of TRL writes is in examples/training/trl_rollouts.py: a run of attempts for the prompts of a step, its
samples, a commit. The policy is a Llama of 100,000 parameters with the demo's vocabulary, served from this process: new
weights need no way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from app import evaluation
from app.client import MegaFlow
from app.evaluation import Submission
from app.ledger import experience, model_replicas
from app.ledger.model_replicas import NewReplica
from app.models.model_calls import Dialect
from app.models.spec import AgentTask, EnvironmentKind, Mode
from bench.system import free_port
from bench.training.demo import REWARDS, TASKS, stack, write_tasks
from bench.training.engine import NAME, Engine
from bench.training.policy import END, LONGEST, VOCABULARY, warm_start
from examples.training.trl_rollouts import Rollouts

GENERATIONS = 16
POLICY = "tiny-by-trl"


class Logits(torch.nn.Module):
    """The demo's kind of policy over one of transformers': token ids to logits."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=token_ids).logits
        return logits


def policy(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model, which knows the form of an answer, and its tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=END,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    warm_start(Logits(model), seed)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    return model, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def reward(completions: list[Any], reward: list[float | None], **_: Any) -> list[float | None]:
    """What the attempt earned; None: it was lost."""
    return reward


def train(flow: MegaFlow, tasks: Sequence[AgentTask], folder: Path, steps: int, seed: int) -> list[dict[str, Any]]:
    model, tokenizer = policy(seed)
    engine = Engine(Logits(model), seed)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(engine.app, host="127.0.0.1", port=port, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    experience.publish(flow.database, POLICY, "v0")
    experience.settle(flow.database, POLICY, "v0")
    url = f"http://127.0.0.1:{port}/v1"
    replica = NewReplica(POLICY, url, upstream_model=NAME, policy_version="v0", dialects=(Dialect.CHAT,))
    model_replicas.add(flow.database, replica)

    def publish(version: str) -> None:
        engine.version = version
        experience.settle(flow.database, POLICY, version)
        model_replicas.swap(flow.database, POLICY, policy_version=version)

    rollouts = Rollouts(
        flow, tasks, "sketch", POLICY, publish, mode=Mode.PERSISTENT, replicas=GENERATIONS, rewards=REWARDS
    )
    config = GRPOConfig(
        output_dir=str(folder),
        num_generations=GENERATIONS,
        per_device_train_batch_size=GENERATIONS * TASKS,
        num_iterations=2,
        importance_sampling_level="sequence",  # GSPO
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        loss_type="grpo",
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        max_steps=2 * steps,
        max_completion_length=LONGEST,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [task.name for task in tasks]}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()
    rollouts.finish(trainer)
    server.should_exit = True
    return rollouts.steps


def main() -> int:
    """Train, and print a line of JSON for each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with stack(lambda line: print(line, file=sys.stderr)) as (settings, folder), MegaFlow(settings) as flow:
        write_tasks(folder / "tasks")
        submission = Submission(dataset=str(folder / "tasks"), agent="nop", environment=EnvironmentKind.OCI)
        tasks = [spec.task for spec in evaluation.specs_of(submission, settings)]
        with tempfile.TemporaryDirectory() as made:
            for step in train(flow, tasks, Path(made), asked.steps, asked.seed):
                print(json.dumps(step))
    return 0


if __name__ == "__main__":
    sys.exit(main())
