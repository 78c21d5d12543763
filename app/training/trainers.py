"""What trains on a step's groups: the reference trainer, or nothing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import DependencyMissing, LimitInvalid, SampleRefused, SpecInvalid, UnknownName
from app.ledger import experience, model_replicas, training
from app.ledger.database import Database
from app.ledger.model_replicas import ModelReplica
from app.model_service.publishing import NewVersion, publish
from app.models.engines import TRAITS
from app.models.publication import OnNewWeights
from app.settings import Settings
from app.training.config import CLIPS, TrainConfig, TrainerKind
from app.training.steps import key_of

_WEIGHTS = "model.safetensors"
_COPIED = (".json", ".txt", ".jinja", ".model")
Groups = Mapping[str, Sequence[Mapping[str, Any]]]


class StepTrainer:
    """Trains nothing: versions are numbers on record, so that everything around a trainer can be tried.

    One that trains has everything that a restart needs on disk before it publishes a version.
    """

    def __init__(self, database: Database, policy: str) -> None:
        self._database, self._policy = database, policy

    def is_trained(self, step: int) -> bool:
        """Whether this step's update has been made and kept."""
        return False

    def train(self, step: int, groups: Groups) -> None:
        """Make the update and keep it. Raises: SampleRefused."""

    def publish(self, step: int, version: str) -> None:
        """Put what was kept after `step` updates behind the policy's name. Raises: as `publishing.publish`."""
        experience.publish(self._database, self._policy, version)  # never live: no engine has it


class ReferenceTrainer(StepTrainer):
    """GSPO in this process. `step-N` in its folder has the weights after N updates for engines, `step-N.pt` the rest.

    Where the model has an attribute `files`, that folder's configuration and tokenizer are copied beside the weights.
    """

    def __init__(self, config: TrainConfig, settings: Settings, database: Database, beside: Path) -> None:
        """beside: the folder of the file, where its model's module may be. Raises: DependencyMissing, SpecInvalid."""
        require_torch()
        from app.model_service.training.trainer import Trainer, TrainOptions

        how = config.trainer
        low, high = CLIPS[how.preset]
        self._folder = own_folder(config, settings, database)
        options = TrainOptions(how.learning_rate, how.minibatch, how.epochs, low, high, config.seed)
        model = _model(how.model, beside)
        self._files: Path | None = getattr(model, "files", None)
        self._trainer = Trainer(model, options)
        super().__init__(database, config.policy)
        self._settings = settings
        self._at: int | None = None  # updates in the trainer's memory; None: of the model as it was made
        if not self.is_trained(-1):
            self._keep(0)

    def is_trained(self, step: int) -> bool:
        return self._weights(step + 1).exists()

    def train(self, step: int, groups: Groups) -> None:
        before = self._go_to(step)
        self._at = None  # until it is kept, what is in memory is of no step
        self._trainer.step(groups)
        self._trainer.save_state(self._folder / f"step-{step + 1}.pt")
        self._keep(step + 1)
        self._at = step + 1
        (self._folder / f"step-{before}.pt").unlink(missing_ok=True)  # as large as the weights, and not gone back to

    def publish(self, step: int, version: str) -> None:
        self._go_to(step)
        weights, probe = self._weights(self._at or 0), self._trainer.probe()
        new = NewVersion(self._policy, version, str(weights), probe, OnNewWeights.DRAIN, takes_over=True)
        publish(self._settings, self._database, new)

    def _go_to(self, step: int) -> int:
        """Have the trainer as it was after the updates of the steps before; steps without groups made none.

        The step of the newest of them. Raises: SampleRefused: a later step was trained on, which left no way back.
        """
        kept = max(number for number in range(step + 1) if self._weights(number).exists())
        if self._at != kept:
            state = self._folder / f"step-{kept}.pt"
            if kept and not state.exists():
                raise SampleRefused(
                    f"expected the state of the optimiser in {state}, found none: a later step was trained on already;"
                    " begin a new run under another `name`"
                )
            self._trainer.load(self._weights(kept) / _WEIGHTS, state if kept else None)
            self._at = kept
        return kept

    def _keep(self, step: int) -> None:
        """Write the folder of a step; it appears when it is complete."""
        partial = self._folder / f"step-{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        self._trainer.save(partial / _WEIGHTS)
        for file in self._files.iterdir() if self._files else ():
            if file.suffix in _COPIED and not file.name.endswith(".index.json"):
                shutil.copy2(file, partial)
        partial.rename(self._weights(step))

    def _weights(self, step: int) -> Path:
        return self._folder / f"step-{step}"


def engines_of(config: TrainConfig, database: Database) -> list[ModelReplica]:
    """The engines that a trained policy's versions go to, verified one by one.

    Raises: UnknownName: there are none; LimitInvalid: the reference trainer cannot give one its weights.
    """
    with database.begin() as connection:
        found = model_replicas.listed(connection, config.policy)
    if not found:
        raise UnknownName(
            f"policy {config.policy!r}: expected engines on record, at which a version is verified before it is live,"
            " found none; `megaflow models add` first"
        )
    for one in found:
        if config.trainer.kind is TrainerKind.GSPO and not TRAITS[one.engine].update:
            raise LimitInvalid(
                f"{one.url}: expected an engine that loads weights from disk while it serves (SGLang), found"
                f" {one.engine.value}; use another, or `kind: external`"
            )
    return found


def folder_of(config: TrainConfig, settings: Settings) -> Path:
    """Where the reference trainer keeps its checkpoints."""
    return (config.trainer.folder or settings.home / "training").absolute() / config.name


def own_folder(config: TrainConfig, settings: Settings, database: Database) -> Path:
    """`folder_of`, with a note of whose it is. Raises: SpecInvalid: its checkpoints are not those of this run."""
    folder = folder_of(config, settings)
    folder.mkdir(parents=True, exist_ok=True)
    note, its = folder / "training.json", {"policy": config.policy, "model": config.trainer.model}
    found = json.loads(note.read_text()) if note.exists() else its
    begun = training.run_of(database, config.user_name, key_of(config, 0)) is not None
    wrong = f"those of {found}" if found != its else ""
    if begun and not (folder / "step-0").exists():
        wrong = "none, though its steps have begun"
    elif not begun and any(folder.glob("step-[1-9]*")):
        wrong = "some, though none of its steps has begun here"
    if wrong:
        raise SpecInvalid(
            f"expected the checkpoints of {its} in {folder}, found {wrong}; give the run another `name`, or the folder"
            " what belongs there"
        )
    partial = note.with_suffix(".partial")
    partial.write_text(json.dumps(its))
    partial.replace(note)
    return folder


def require_torch() -> None:
    """Raises: DependencyMissing."""
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyMissing(
            f"expected {' and '.join(missing)} for the trainer `gspo`, found none; install the extra `train`,"
            " or use `kind: external`"
        )


def trainer_of(config: TrainConfig, settings: Settings, database: Database, beside: Path) -> StepTrainer | None:
    """The file's trainer; None: it is elsewhere. Raises: DependencyMissing, SpecInvalid."""
    if config.trainer.kind is TrainerKind.EXTERNAL:
        return None
    if config.trainer.kind is TrainerKind.NONE:
        return StepTrainer(database, config.policy)
    return ReferenceTrainer(config, settings, database, beside)


def _model(name: str, beside: Path) -> Any:
    """Calls MODULE:FUNCTION. Raises: SpecInvalid: there is none."""
    module, colon, function = name.partition(":")
    sys.path.insert(0, str(beside))
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecInvalid(
            f"trainer.model: expected MODULE:FUNCTION that makes the model, found {name!r}: {error}"
        ) from error
    finally:
        sys.path.remove(str(beside))
    if not colon or not callable(getattr(made, "parameters", None)):
        raise SpecInvalid(f"trainer.model: expected a torch.nn.Module of {name!r}, found {type(made).__name__}")
    return made
