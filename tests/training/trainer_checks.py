"""What must hold of the reference trainer; `test_trainer.py` runs it by pytest in .venv-train, which has torch."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

from app.errors import SampleRefused
from app.model_service.training.gspo import gspo_loss
from app.model_service.training.trainer import Trainer, TrainOptions, load_weights
from app.models.groups import advantages

OPTIONS = TrainOptions(learning_rate=1e-2, minibatch=4, epochs=2, clip_low=0.2, clip_high=0.3)


class Words(torch.nn.Module):
    """Each token's successor, by a table."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, width)
        self.out = torch.nn.Linear(width, 10)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(token_ids))


def a_row(attempt: int, reward: float, **values: Any) -> dict[str, Any]:
    chance = random.Random(attempt)
    length = chance.randint(4, 9)
    given = {
        "attempt_id": str(attempt),
        "reward": reward,
        "temperature": 1.0,
        "token_ids": [chance.randrange(10) for _ in range(length)],
        "mask": [False, False, *(chance.random() < 0.7 for _ in range(length - 3)), True],
        "logprobs": [-1.0 - chance.random() for _ in range(length)],
    }
    return given | values


def groups() -> dict[str, list[dict[str, Any]]]:
    return {"a": [a_row(n, float(n % 2)) for n in (0, 1, 1, 2, 3, 4)], "b": [a_row(n, n / 10) for n in range(5, 11)]}


def test_the_loss_is_that_of_the_paper() -> None:
    chance = torch.Generator().manual_seed(3)
    now, recorded = -torch.rand(4, 6, generator=chance), -torch.rand(4, 6, generator=chance)
    mask = torch.rand(4, 6, generator=chance) < 0.6
    mask[:, 0] = True
    gains = torch.tensor([1.0, -1.0, 0.5, -2.0])
    found = gspo_loss(now, recorded, mask, gains, clip_low=0.05, clip_high=0.1)
    terms, cut = [], 0
    for row in range(4):
        own = [t for t in range(6) if mask[row, t]]
        ratio = math.exp(sum(float(now[row, t] - recorded[row, t]) for t in own) / len(own))
        kept = min(max(ratio, 0.95), 1.1)
        cut += kept != ratio
        terms.append(min(ratio * float(gains[row]), kept * float(gains[row])))
    assert float(found.loss) == pytest.approx(-sum(terms) / 4, abs=1e-6)
    assert found.clipped == cut / 4


def test_an_attempt_counts_once_and_equal_rewards_teach_nothing() -> None:
    rows = [a_row(1, 1.0), a_row(1, 1.0), a_row(2, 0.0)]
    assert advantages(rows) == [1.0, 1.0, -1.0]
    assert advantages([a_row(1, 0.5), a_row(2, 0.5)]) == [0.0, 0.0]


def test_an_attempt_of_several_samples_weighs_as_one_of_a_minibatch() -> None:
    learnt = []
    for parts in (1, 3):
        torch.manual_seed(0)
        trainer = Trainer(Words(), OPTIONS)
        rows = [a_row(n, float(n % 2)) for n in range(6)]
        trainer.step({"a": rows[:5] + [rows[5]] * parts})
        learnt.append(trainer.model.state_dict())
    for name, one in learnt[0].items():
        assert torch.allclose(one, learnt[1][name], atol=1e-5), name


def _train(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(0)
    if world > 1:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    trainer = Trainer(Words(), OPTIONS)
    trainer.step(groups())
    trainer.save(Path(folder) / f"{world}.safetensors")
    if world > 1:
        distributed.destroy_process_group()


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    _train(0, 1, str(tmp_path))
    multiprocessing.spawn(_train, args=(2, str(tmp_path)), nprocs=2)
    alone, together, fresh = Words(), Words(), Words()
    load_weights(alone, tmp_path / "1.safetensors")
    load_weights(together, tmp_path / "2.safetensors")
    torch.manual_seed(0)
    fresh = Words()
    for name, one in alone.state_dict().items():
        assert torch.allclose(one, together.state_dict()[name], atol=1e-5), name
        assert not torch.allclose(one, fresh.state_dict()[name], atol=1e-3), "it has learnt"


def test_a_trainer_that_is_loaded_goes_on_as_if_it_had_never_ended(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Trainer(Words(), OPTIONS)
    whole.step(groups())
    whole.save(tmp_path / "w.safetensors")
    whole.save_state(tmp_path / "w.pt")
    other = Trainer(Words(), OPTIONS)
    other.step({"c": [a_row(1, 1.0), a_row(2, 0.0)]})  # what it knew is gone
    other.load(tmp_path / "w.safetensors", tmp_path / "w.pt")
    assert other.probe() == whole.probe()
    for trainer in (whole, other):
        trainer.step(groups())
    for name, one in whole.model.state_dict().items():
        assert torch.equal(one, other.model.state_dict()[name]), name
    fresh = Trainer(Words(), OPTIONS)
    fresh.load(tmp_path / "w.safetensors", None)
    fresh.step(groups())
    assert any(not torch.equal(one, fresh.model.state_dict()[n]) for n, one in whole.model.state_dict().items())


def test_tied_weights_are_written_and_read_again(tmp_path: Path) -> None:
    model = Words()
    model.table.weight = model.out.weight
    Trainer(model, OPTIONS).save(tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    assert model.table.weight is model.out.weight


def test_weights_of_another_shape_are_refused_and_change_nothing(tmp_path: Path) -> None:
    Trainer(Words(width=4), OPTIONS).save(tmp_path / "w.safetensors")
    model = Words()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(SampleRefused, match="names and shapes"):
        load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in before.items())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"reward": math.nan}, "finite reward"),
        ({"mask": [True, *([False] * 20)][:4], "token_ids": [1] * 4, "logprobs": [0.0] * 4}, "policy's"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is(values: dict[str, Any], words: str) -> None:
    trainer = Trainer(Words(), OPTIONS)
    before = [one.clone() for one in trainer.model.parameters()]
    with pytest.raises(SampleRefused, match=words):
        trainer.step({"a": [a_row(1, 1.0), a_row(2, 0.0) | values]})
    assert all(torch.equal(one, now) for one, now in zip(before, trainer.model.parameters(), strict=True))
