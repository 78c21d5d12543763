"""Trains a policy on batches of samples and writes its weights as safetensors.

On several processes (torchrun) the model is sharded by FSDP2 and each process takes its share of every minibatch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from app.errors import SampleRefused
from app.model_service.training.gspo import gspo_loss
from app.models.groups import advantages
from app.models.publication import ProbeSequence

_MOST_GRADIENT = 1.0
"""Largest norm of gradients; larger ones are scaled down to it."""
_PROBE_TOKENS = 48


class Policy(Protocol):
    """A model: token ids (int, sequences × tokens) to logits (float, sequences × tokens × vocabulary)."""

    def __call__(self, token_ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of one step. Defaults: the paper's values, except `clip_low`, which is 2e-4 there, and 3e-4 in GSPO's."""

    learning_rate: float = 1e-6
    minibatch: int = 64  # attempts, however many samples each has
    epochs: int = 2
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of one batch. `gap`: greatest difference to a recorded log-probability, before the first update."""

    samples: int
    loss: float
    clipped: float
    gap: float


class Trainer:
    """A policy and its optimiser."""

    def __init__(self, model: torch.nn.Module, options: TrainOptions) -> None:
        self._rank, self._world = 0, 1
        if distributed.is_available() and distributed.is_initialized():
            self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
            fully_shard(model)
        self.model = model
        self._options = options
        self._optimizer = _optimizer(model, options)
        self._steps = 0

    def step(self, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> StepReport:
        """Trains on a batch's groups (`Batch.groups`).

        Raises: SampleRefused: a sample has another temperature than 1 (its log-probabilities would not fit), no token
            of the policy, or a reward that is no finite number; nothing was trained on.
        """
        rows = [row for group in groups.values() for row in group]
        for row in rows:
            _check(row)
        attempts: dict[str, list[tuple[Mapping[str, Any], float]]] = {}
        for group in groups.values():
            for row, advantage in zip(group, advantages(group), strict=True):
                attempts.setdefault(row["attempt_id"], []).append((row, advantage))
        scored = list(attempts.values())
        order = random.Random(f"{self._options.seed}/{self._steps}")  # the same on every process
        self._steps += 1
        losses: list[float] = []
        clipped: list[float] = []
        gap = 0.0
        for epoch in range(self._options.epochs):
            order.shuffle(scored)
            for start in range(0, len(scored), self._options.minibatch):
                stats = self._update(scored[start : start + self._options.minibatch])
                if stats is not None:
                    losses.append(stats[0])
                    clipped.append(stats[1])
                    gap = max(gap, stats[2]) if epoch == 0 and start == 0 else gap
        return StepReport(len(rows), _mean(losses), _mean(clipped), gap)

    def _update(
        self, attempts: Sequence[Sequence[tuple[Mapping[str, Any], float]]]
    ) -> tuple[float, float, float] | None:
        """Updates on one minibatch, in which each attempt weighs the same: a sample of k weighs a k-th."""
        each = self._world / len(attempts)  # gradients are averaged over the processes
        minibatch = [(row, advantage, each / len(parts)) for parts in attempts for row, advantage in parts]
        share = minibatch[self._rank :: self._world]
        own = share or [(*minibatch[0][:2], 0.0)]  # a process without a share takes part with weight 0
        ids, mask, recorded = _padded([row for row, _, _ in own])
        logits = self.model(ids[:, :-1])
        scores = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        result = gspo_loss(
            scores,
            recorded[:, 1:],
            mask[:, 1:],
            torch.tensor([advantage for _, advantage, _ in own]),
            torch.tensor([weight for _, _, weight in own]),
            clip_low=self._options.clip_low,
            clip_high=self._options.clip_high,
        )
        self._optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MOST_GRADIENT)
        self._optimizer.step()
        return (float(result.loss.detach()), result.clipped, result.gap) if share else None

    def probe(self) -> ProbeSequence:
        """Returns a fixed sequence of token ids with the policy's log-probabilities, to verify an engine's weights."""
        with torch.no_grad():
            vocabulary = self.model(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
            ids = torch.tensor([[(7 * number + 3) % vocabulary for number in range(_PROBE_TOKENS)]])
            scores = torch.log_softmax(self.model(ids[:, :-1]).float(), -1).gather(-1, ids[:, 1:, None])
        return ProbeSequence(token_ids=ids[0].tolist(), logprobs=[None, *scores.flatten().tolist()])

    def save_state(self, file: Path) -> None:
        """Writes what weights do not have: the optimiser's state and the number of steps. For a single process."""
        assert self._world == 1, "shards of an optimiser are not put together here"
        partial = file.with_suffix(".partial")
        torch.save({"optimizer": self._optimizer.state_dict(), "steps": self._steps}, partial)
        partial.replace(file)

    def load(self, weights: Path, state: Path | None) -> None:
        """Restores weights and state. state None: as before the first step. Raises: SampleRefused."""
        load_weights(self.model, weights)
        self._optimizer, self._steps = _optimizer(self.model, self._options), 0
        if state is not None:
            saved = torch.load(state, weights_only=True)
            self._optimizer.load_state_dict(saved["optimizer"])
            self._steps = saved["steps"]

    def save(self, file: Path) -> None:
        """Writes the full weights, by the first process; the others wait. The file appears when it is complete."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options) if self._world > 1 else self.model.state_dict()
        if self._rank == 0:
            partial = file.with_suffix(".partial")
            save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, partial)  # some are tied
            partial.replace(file)
        if self._world > 1:
            distributed.barrier()


def _optimizer(model: torch.nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)


def load_weights(model: torch.nn.Module, file: Path) -> None:
    """Loads a file's weights into a model. Raises: SampleRefused: other names or shapes; the model is unchanged."""
    weights, own = load_file(file), model.state_dict()
    wrong = [
        name
        for name in own.keys() | weights.keys()
        if name not in own or name not in weights or own[name].shape != weights[name].shape
    ]
    if wrong:
        raise SampleRefused(
            f"expected weights of the policy's names and shapes in {file.name}; others: {sorted(wrong)[:5]}"
        )
    model.load_state_dict(weights)


def _check(row: Mapping[str, Any]) -> None:
    where = f"attempt {row['attempt_id']}"
    if not math.isfinite(float(row["reward"])):
        raise SampleRefused(f"expected a finite reward, found {row['reward']} in {where}")
    if row["temperature"] not in (None, 1.0):
        raise SampleRefused(f"expected samples of temperature 1, found {row['temperature']} in {where}")
    if not any(row["mask"][1:]):
        raise SampleRefused(f"expected tokens of the policy's after the first, found none in {where}")


def _padded(rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids, mask and log-probabilities, sequences × the longest's tokens; padding is masked out."""
    longest = max(len(row["token_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    recorded = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        length = len(row["token_ids"])
        ids[number, :length] = torch.tensor(row["token_ids"])
        mask[number, :length] = torch.tensor(row["mask"])
        recorded[number, :length] = torch.tensor(row["logprobs"])
    return ids, mask, recorded


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
