"""The file of a training run: the paper's as it is, what is refused, and what is drawn from it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from app.errors import SampleRefused, SpecInvalid
from app.ledger.database import Database
from app.models.groups import GroupRules
from app.models.spec import REPLAY_MODEL
from app.settings import Settings
from app.training import trainers
from app.training.config import CLIPS, TrainConfig, TrainerKind, checked_config, read_config
from app.training.steps import experience_of, frameworks_of, key_of, plan_step
from app.training.trainers import ReferenceTrainer
from tests.building import new_id

PAPER = Path(__file__).parents[2] / "examples" / "training" / "paper.yaml"


def a_config(**values: Any) -> TrainConfig:
    given = {
        "name": "small",
        "policy": "policy",
        "datasets": ["demo"],
        "frameworks": {"mini-swe-agent": 3, "qwen-code": 1},
        "steps": 3,
        "groups": 8,
        "replicas": 2,
        "trainer": {"kind": "none"},
    }
    return checked_config(given | values, "small.yaml")


def test_the_papers_file_says_what_its_appendix_says() -> None:
    found = read_config(PAPER)
    assert (found.groups, found.replicas, found.rollouts, found.steps) == (64, 16, 1024, 100)
    assert (found.sampling.temperature, found.limits.max_turn_tokens, found.limits.max_steps) == (1.0, 4096, 100)
    assert found.limits.context_tokens == 128 * 1024
    assert {name: one.conditions() for name, one in found.selections.items()} == {
        "swe-rebench": {"until": "2025-03-01T00:00:00Z"}
    }
    assert found.rewards == {"not_submitted": -0.5}
    assert len(set(found.frameworks.values())) == 1
    assert sorted(found.frameworks) == ["claude-code", "mini-swe-agent", "openhands", "qwen-code", "swe-agent"]
    assert (found.trainer.learning_rate, found.trainer.minibatch, found.trainer.epochs) == (1e-6, 64, 2)
    assert CLIPS[found.trainer.preset] == (2e-4, 4e-4)


def test_a_scale_makes_a_rehearsal_that_trains_nothing_and_is_not_the_run_itself() -> None:
    asked = checked_config({**yaml.safe_load(PAPER.read_text()), "scale": "1/64"}, "paper")
    found = asked.effective()
    assert (found.groups, found.replicas, found.trainer.kind) == (1, 16, TrainerKind.NONE)
    assert found.model.name == REPLAY_MODEL
    assert key_of(found, 0) != key_of(asked, 0)
    assert read_config(PAPER).effective().model.name == "policy"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 0}, "steps: expected"),
        ({"groups": "many"}, "groups: expected"),
        ({"frameworks": {}}, "frameworks: expected"),
        ({"frameworks": {"nop": 0}}, "frameworks.nop: expected"),
        ({"frameworks": {"nop": float("nan")}}, "frameworks.nop: expected"),
        ({"name": "../up"}, "name: "),
        ({"scale": "1/0"}, "scale: expected a share"),
        ({"scale": 2}, "scale: expected a share"),
        ({"quorum": 3}, "expected a quorum from 1 to 2 replicas, found 3"),
        ({"hedge_after": "95"}, "hedge_after: expected a percentile such as 'p95', found '95'"),
        ({"most_replicas": 2}, "expected adaptive replicas from at least 2 to more"),
        ({"max_staleness": -1}, "max_staleness: expected"),
        ({"selection": {"sample": 4}}, "expected no `sample` and `limit`"),
        ({"selections": {"other": {"since": "2024-01-01"}}}, "expected `selections` of demo; found 'other'"),
        ({"selections": {"demo": {"pass_rate": "0<p", "pass_rate_from": "r"}}}, "expected `pass_rate` in `selection`"),
        ({"trainer": {"kind": "gspo"}}, "expected `model: MODULE:FUNCTION`"),
        ({"trainer": {"kind": "gspo", "model": "a:b"}, "sampling": {"top_p": 0.9}}, "expected `temperature: 1.0`"),
        ({"trainer": {"kind": "none", "clip": 1}}, "trainer.clip"),
        ({"rewards": {"not_submitted": float("inf")}}, "rewards.not_submitted"),
        ({"optimizer": "sgd"}, "optimizer"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecInvalid, match=words):
        a_config(**values)


@pytest.mark.parametrize("text", ["", "- a list", "a: [", "\0"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(SpecInvalid, match=r"c\.yaml: expected a (YAML file|mapping)"):
        read_config(file)


def test_frameworks_are_mixed_by_weight_and_the_same_for_a_seed() -> None:
    config = a_config(groups=10)
    every = [frameworks_of(config, step) for step in range(40)]
    assert every == [frameworks_of(a_config(groups=10), step) for step in range(40)]
    assert {tuple(one) for one in every} > {tuple(every[0])}, "another order in other steps"
    for one in every:
        assert Counter(one)["mini-swe-agent"] in (7, 8), "three quarters of ten, but for less than one group"
    assert frameworks_of(a_config(groups=10, seed=1), 0) != every[0] or frameworks_of(a_config(seed=1), 1) != every[1]
    alone = Counter(one for step in range(400) for one in frameworks_of(a_config(groups=1), step))
    assert 250 < alone["mini-swe-agent"] < 350, "a single group has each by its weight, too"


def test_a_steps_run_has_the_rules_of_the_files_groups(tmp_path: Path) -> None:
    rules = {"replicas": 4, "quorum": 5, "most_replicas": 6, "hedge_after": "p95", "max_staleness": 2}
    its = {"demo": {"only": ["csv-to-jsonl", "lost-settings"]}}
    config = a_config(**rules, groups=2, selections=its, frameworks={"oracle": 1}, trainer={"kind": "external"})
    plan = plan_step(config, 0, Settings(home=tmp_path), Database("postgresql://127.0.0.1:1/none"))
    assert (plan.run.replicas, plan.run.groups) == (4, GroupRules(quorum=5, hedge_after="p95", most=6))
    assert plan.pool == 2, "what the dataset's own selection leaves"
    assert plan.run.provenance is not None
    assert plan.run.provenance["selections"] == its
    opened = experience_of(config, new_id())
    assert (opened.quorum, opened.max_staleness) == (5, 2)
    rehearsal = config.model_copy(update={"scale": "1"}).effective()
    assert experience_of(rehearsal, new_id()).max_staleness is None, "scripts have no versions"


class _Trainer:
    """Counts its updates in place of weights."""

    def __init__(self, *_: object) -> None:
        self.updates = 0

    def step(self, groups: object) -> None:
        self.updates += 1

    def save(self, file: Path) -> None:
        file.write_text(str(self.updates))

    save_state = save

    def load(self, weights: Path, state: Path | None) -> None:
        self.updates = int((state or weights).read_text())


def test_one_state_is_kept_through_empty_steps_and_a_step_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = SimpleNamespace(Trainer=_Trainer, TrainOptions=lambda *_: None)
    monkeypatch.setitem(sys.modules, "app.model_service.training.trainer", stand_in)
    monkeypatch.setattr(trainers, "require_torch", lambda: None)
    monkeypatch.setattr(trainers, "_model", lambda *_: None)
    monkeypatch.setattr(trainers, "own_folder", lambda *_: tmp_path)
    config = a_config(trainer={"kind": "gspo", "model": "a:b"})
    made = ReferenceTrainer(config, Settings(home=tmp_path), Database("postgresql://none"), tmp_path)
    for step in (0, 1, 3):  # step 2 was empty
        made.train(step, {})
    assert [file.name for file in tmp_path.glob("*.pt")] == ["step-4.pt"]
    with pytest.raises(SampleRefused, match="a later step was trained on already"):
        made.train(2, {})
    made.train(4, {})
    assert (tmp_path / "step-5" / "model.safetensors").read_text() == "4"
