"""Defines the file of a training run, which `megaflow train` reads."""

from __future__ import annotations

import math
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from app.datasets.selection import Selection
from app.errors import SpecInvalid, explained
from app.models.groups import GroupRules
from app.models.kinds import Purpose
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import (
    REPLAY_MODEL,
    EnvironmentKind,
    LabelText,
    Mode,
    ModelChoice,
    PlainText,
    RewardRules,
    Sampling,
    Wire,
)

CLIPS = {"gspo": (3e-4, 4e-4), "megaflow-paper": (2e-4, 4e-4)}
"""Limits of a sequence's ratio below and above 1, by preset: GSPO's own values, and MegaFlow's (appendix D)."""


class TrainerKind(StrEnum):
    """Kind of trainer."""

    GSPO = "gspo"  # the reference trainer, in this process
    EXTERNAL = "external"  # the user's trainer, which gets the groups over HTTP, publishes and commits
    NONE = "none"  # nothing is trained: groups are counted and committed


class TrainerConfig(Wire):
    """Trainer of a training run, and options of the reference trainer."""

    kind: TrainerKind = TrainerKind.GSPO
    model: PlainText = ""  # MODULE:FUNCTION, next to the file or installed: makes the model, with its first weights
    folder: Path | None = None  # its folder NAME has checkpoints, which engines can read; None: in the home
    preset: Literal["gspo", "megaflow-paper"] = "gspo"
    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    minibatch: int = Field(default=64, ge=1, le=65_536)  # attempts
    epochs: int = Field(default=2, ge=1, le=1_000)

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if (self.kind is TrainerKind.GSPO) != bool(self.model):
            raise ValueError("expected `model: MODULE:FUNCTION` with the kind `gspo`, and only there")
        return self


def _share(value: str | float | None) -> str | None:
    if value is None:
        return None
    try:
        share = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(
            f"expected a share of the groups such as 1/64, above 0 and at most 1; found {str(value)[:40]!r}"
        )
    return str(share)


Weight = Annotated[float, Field(gt=0, le=1e6)]


class TrainConfig(Wire):
    """Settings of a training run: `steps` runs, each of `groups` tasks of the pool, `replicas` times each."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
    policy: LabelText = Field(min_length=1)  # the model's stable name: `megaflow models add`
    datasets: tuple[PlainText, ...] = Field(min_length=1)  # as `megaflow submit` takes them; together one pool
    selection: Selection = Selection()  # which of their tasks
    selections: dict[PlainText, Selection] = {}  # by dataset: which of its tasks are in the pool
    frameworks: dict[PlainText, Weight] = Field(min_length=1)  # agents, by weight; a group has one of them
    steps: int = Field(ge=1, le=1_000_000)
    groups: int = Field(ge=1, le=10_000)
    replicas: int = Field(ge=1, le=1_000)
    most_replicas: int | None = None  # of a group whose rewards differ; this and the next two: see `GroupRules`
    quorum: int | None = None
    hedge_after: str | None = None
    max_staleness: int | None = Field(default=None, ge=0, le=100)  # versions; and steps begun ahead of the trainer
    drop_equal: bool = False  # leave out groups whose rewards are all equal
    seed: int = Field(default=0, ge=0, lt=2**31)
    scale: Annotated[str | float | None, AfterValidator(_share)] = None  # a rehearsal with this share of the groups
    sampling: Sampling = Sampling(temperature=1.0)
    limits: LimitOverrides = LimitOverrides()
    overrides: EnvironmentOverrides = EnvironmentOverrides()
    rewards: RewardRules = {}
    environment: EnvironmentKind = EnvironmentKind.DOCKER
    mode: Mode = Mode.AUTO
    resource_class: str = "standard"
    max_running: int | None = Field(default=None, ge=1)
    user_name: LabelText = Field(default="default", min_length=1)
    trainer: TrainerConfig

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.selection.sample is not None or self.selection.limit is not None:
            raise ValueError("expected no `sample` and `limit` in `selection`: each step draws `groups` of the tasks")
        if unknown := sorted(self.selections.keys() - set(self.datasets)):
            raise ValueError(f"expected `selections` of {', '.join(self.datasets)}; found {unknown[0]!r}")
        if any(one.pass_rate is not None for one in self.selections.values()):
            raise ValueError("expected `pass_rate` in `selection`, which is of the pool; found it in `selections`")
        if self.trainer.kind is TrainerKind.GSPO and self.sampling.temperature != 1.0:
            raise ValueError("expected `temperature: 1.0` in `sampling`, without which `gspo` trains on no sample")
        try:
            self.rules.check(self.replicas, Purpose.TRAINING)
        except SpecInvalid as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def rules(self) -> GroupRules:
        """Rules that decide when a group is complete, and when it gets another replica."""
        return GroupRules(self.quorum, self.hedge_after, self.most_replicas)

    @property
    def rollouts(self) -> int:
        """Number of attempts in one step, with the first replicas of each group."""
        return self.groups * self.replicas

    @property
    def model(self) -> ModelChoice:
        """Model that the agents call: the policy, or, in a rehearsal, the replay engine."""
        return ModelChoice(name=self.policy if self.scale is None else REPLAY_MODEL, sampling=self.sampling)

    def effective(self) -> TrainConfig:
        """Returns the config to run: with a scale a rehearsal with fewer groups, scripted answers and no training."""
        if self.scale is None:
            return self
        groups = max(1, math.floor(self.groups * Fraction(str(self.scale))))
        changes = {"groups": groups, "trainer": TrainerConfig(kind=TrainerKind.NONE)}
        names = {"name": f"{self.name}-rehearsal", "policy": f"{self.name}-rehearsal"}
        return self.model_copy(update=changes | names)


def read_config(path: Path) -> TrainConfig:
    """Raises: SpecInvalid: no YAML file, or one that describes no training run; with the key and what was expected."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise SpecInvalid(f"{path}: expected a YAML file, found: {error}") from error
    return checked_config(data, str(path))


def checked_config(given: object, where: str) -> TrainConfig:
    """Raises: SpecInvalid: as `read_config`."""
    if not isinstance(given, dict):
        raise SpecInvalid(f"{where}: expected a mapping such as `steps: 100`, found {given!r:.60}")
    try:
        return TrainConfig.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SpecInvalid(
            f"{where}: {place or 'the file'}: {explained(first)}; found {first['input']!r:.80}"
        ) from error
