"""Defines the trainers of a step's groups: the reference trainer, and one that trains nothing."""

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
from app.model_service.publishing import publish
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

    A subclass that trains has everything for a restart on disk before it publishes a version.
    """

    def __init__(self, database: Database, policy: str) -> None:
        self._database, self._policy = database, policy

    def is_trained(self, step: int) -> bool:
        """Whether this step's update has been made and saved."""
        return False

    def train(self, step: int, groups: Groups) -> None:
        """Makes the update and saves it. Raises: SampleRefused."""

    def publish(self, step: int, version: str) -> None:
        """Publishes the state saved after `step` steps under the policy's name. Raises: as `publishing.publish`."""
        experience.publish(self._database, self._policy, version)  # never live: no engine has it


class ReferenceTrainer(StepTrainer):
    """GSPO in this process. `step-N` in its folder has the weights after N steps for engines, `step-N.pt` the rest.

    If the model has an attribute `files`, that folder's configuration and tokenizer are copied next to the weights.
    """

    def __init__(self, config: TrainConfig, settings: Settings, database: Database, beside: Path) -> None:
        """beside: the config file's folder, where the model's module may be. Raises: DependencyMissing, SpecInvalid."""
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
        self._at: int | None = None  # step of the weights in memory; None: of no saved step
        if not self.is_trained(-1):
            self._keep(0)

    def is_trained(self, step: int) -> bool:
        return self._weights(step + 1).exists()

    def train(self, step: int, groups: Groups) -> None:
        before = self._go_to(step)
        self._at = None  # until they are saved, the weights in memory belong to no step
        self._trainer.step(groups)
        self._trainer.save_state(self._folder / f"step-{step + 1}.pt")
        self._keep(step + 1)
        self._at = step + 1
        (self._folder / f"step-{before}.pt").unlink(missing_ok=True)  # as large as the weights, and not needed again

    def publish(self, step: int, version: str) -> None:
        self._go_to(step)
        weights, probe = self._weights(self._at or 0), self._trainer.probe()
        how = OnNewWeights.DRAIN
        publish(self._settings, self._database, self._policy, version, str(weights), probe, how, takes_over=True)

    def _go_to(self, step: int) -> int:
        """Restores the trainer as it was after the updates of earlier steps; steps without groups made none.

        Returns the newest such step. Raises: SampleRefused: a later step was trained on, which left no way back.
        """
        newest = max(number for number in range(step + 1) if self._weights(number).exists())
        if self._at != newest:
            state = self._folder / f"step-{newest}.pt"
            if newest and not state.exists():
                raise SampleRefused(
                    f"expected the state of the optimiser in {state}, found none: a later step was trained on already;"
                    " begin a new run under another `name`"
                )
            self._trainer.load(self._weights(newest) / _WEIGHTS, state if newest else None)
            self._at = newest
        return newest

    def _keep(self, step: int) -> None:
        """Writes the folder of a step; it appears when it is complete."""
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
    """Returns the engines that get a trained policy's versions, verified one by one.

    Raises: UnknownName: there are none; LimitInvalid: the reference trainer cannot load its weights into one.
    """
    with database.begin() as connection:
        engines = model_replicas.listed(connection, config.policy)
    if not engines:
        raise UnknownName(
            f"policy {config.policy!r}: expected engines on record, at which a version is verified before it is live,"
            " found none; `megaflow models add` first"
        )
    for one in engines:
        if config.trainer.kind is TrainerKind.GSPO and not TRAITS[one.engine].update:
            raise LimitInvalid(
                f"{one.url}: expected an engine that loads weights from disk while it serves (SGLang), found"
                f" {one.engine.value}; use another, or `kind: external`"
            )
    return engines


def folder_of(config: TrainConfig, settings: Settings) -> Path:
    """Returns the folder of the reference trainer's checkpoints."""
    return (config.trainer.folder or settings.home / "training").absolute() / config.name


def own_folder(config: TrainConfig, settings: Settings, database: Database) -> Path:
    """Makes `folder_of`, with a note of its run. Raises: SpecInvalid: its checkpoints are not those of this run."""
    folder = folder_of(config, settings)
    folder.mkdir(parents=True, exist_ok=True)
    note, own = folder / "training.json", {"policy": config.policy, "model": config.trainer.model}
    noted = json.loads(note.read_text()) if note.exists() else own
    begun = training.run_of(database, config.user_name, key_of(config, 0)) is not None
    wrong = f"those of {noted}" if noted != own else ""
    if begun and not (folder / "step-0").exists():
        wrong = "none, though its steps have begun"
    elif not begun and any(folder.glob("step-[1-9]*")):
        wrong = "some, though none of its steps has begun here"
    if wrong:
        raise SpecInvalid(
            f"expected the checkpoints of {own} in {folder}, found {wrong}; give the run another `name`, or the folder"
            " what belongs there"
        )
    partial = note.with_suffix(".partial")
    partial.write_text(json.dumps(own))
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
    """Creates the file's trainer. None: it is external. Raises: DependencyMissing, SpecInvalid."""
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
        model = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecInvalid(
            f"trainer.model: expected MODULE:FUNCTION that makes the model, found {name!r}: {error}"
        ) from error
    finally:
        sys.path.remove(str(beside))
    if not colon or not callable(getattr(model, "parameters", None)):
        raise SpecInvalid(f"trainer.model: expected a torch.nn.Module of {name!r}, found {type(model).__name__}")
    return model
