"""Runs the steps of a training run, each from where it was left: a killed loop goes on at the last committed step.

What a step has come to is read from PostgreSQL and from the trainer's folder, never remembered: its run by the
idempotency key, its groups, its update by the file of the weights, its version, its commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar
from uuid import UUID

from app.artifacts import open_store
from app.client import MegaFlow
from app.errors import ArtifactStoreUnavailable, DatabaseUnavailable, ModelEndpointUnavailable, SampleRefused
from app.experience.hand_out import Experience
from app.ledger import experience, training
from app.ledger.experience import ExperienceRun
from app.ledger.results import Progress, progress_of
from app.ledger.training import LoopLock, StepFigures
from app.training.config import TrainConfig, TrainerKind
from app.training.steps import experience_of, key_of, plan_step
from app.training.trainers import StepTrainer, engines_of, trainer_of

_LOOK_S = 1.0
_LEASE_S = 30 * 86_400.0
"""A step's groups are this loop's alone; one that is started again releases them first."""
_MOST_NAMES = 4
"""A refused version is refused for good, though an engine may have been away: its weights get another name."""
_MOST_EMPTY = 3
"""Steps without a sample, one after the other."""
_PATIENCE_S = 900.0
"""For how long what does not answer is asked again."""
_AWAY = (DatabaseUnavailable, ArtifactStoreUnavailable, ModelEndpointUnavailable)
AnyResult = TypeVar("AnyResult")


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that is over. version None: no group had anything to train on."""

    step: int
    run_id: UUID
    version: str | None
    figures: StepFigures


class LoopView(Protocol):
    """What is shown of a loop."""

    def progress(self, step: int, what: str, now: Progress | None, so_far: StepFigures | None = None) -> None: ...

    def done(self, result: FinishedStep) -> None: ...

    def trouble(self, text: str) -> None: ...


class TrainingLoop:
    """One training run. Only one process has it at a time."""

    def __init__(self, flow: MegaFlow, config: TrainConfig, view: LoopView, *, beside: Path) -> None:
        """config: `TrainConfig.effective`. beside: the folder of its file."""
        self._flow, self._config, self._view, self._beside = flow, config, view, beside
        self._database = flow.database
        self._store = open_store(flow.settings.artifacts(), endpoint_url=flow.settings.s3_endpoint_url)
        self._bounded = config.trainer.kind is not TrainerKind.NONE
        self._ahead = config.max_staleness or 0  # steps
        self._trainer: StepTrainer | None = None  # it writes files: made when the lock is held
        self._lock = LoopLock(flow.database, config.name)

    def run(self) -> list[FinishedStep]:
        """Do what is left of all steps; the results of all.

        Raises: LimitInvalid: another process runs it; SampleRefused: several steps came to nothing, or a version is
            refused; DependencyMissing, SpecInvalid: there is no such trainer; UnknownName: no engines of the policy;
            as `MegaFlow.accept`; whatever does not answer for 15 minutes.
        """
        if self._bounded:
            engines_of(self._config, self._database)
        self._lock.hold()
        try:
            self._trainer = trainer_of(self._config, self._flow.settings, self._database, self._beside)
            self._patiently(0, self._first_version)
            found: list[FinishedStep] = []
            for step in range(self._config.steps):
                found.append(self._patiently(step, self._step))
                self._refuse_to_go_on_for_nothing(found[-_MOST_EMPTY:])
            return found
        finally:
            self._lock.close()

    def _patiently(self, step: int, work: Callable[[int], AnyResult]) -> AnyResult:
        """What is asked for again does again what was left undone, and nothing twice."""
        away_since = None
        while True:
            begun = time.monotonic()
            try:
                self._lock.hold()
                return work(step)
            except _AWAY as error:
                now = time.monotonic()
                if away_since is None or now - begun > _PATIENCE_S:
                    away_since = now
                if now - away_since > _PATIENCE_S:
                    raise
                self._view.trouble(f"step {step}: {error}")
                time.sleep(_LOOK_S)

    def _refuse_to_go_on_for_nothing(self, last: list[FinishedStep]) -> None:
        """Raises: SampleRefused."""
        if len(last) == _MOST_EMPTY and not any(one.version for one in last):
            raise SampleRefused(
                f"expected samples, found none in {_MOST_EMPTY} steps one after the other:"
                f" {training.why_nothing(self._database, last[-1].run_id)}"
            )

    def _first_version(self, _step: int) -> None:
        """The policy's weights before the first step, so that their answers have a version."""
        if self._trainer is not None and training.run_of(self._database, self._config.user_name, self._key(0)) is None:
            self._publish(-1)

    def _begun(self, step: int) -> ExperienceRun:
        """A step's run, accepted and feeding the trainer."""
        run_id = training.run_of(self._database, self._config.user_name, self._key(step))
        if run_id is None:
            self._view.progress(step, "drawing tasks", None)
            plan = plan_step(self._config, step, self._flow.settings, self._database)
            run_id = self._flow.accept(plan.run).id
        how = experience_of(self._config, run_id)
        experience.open_run(self._database, how)
        return how

    def _step(self, step: int) -> FinishedStep:
        """Those after it begin with it, as far ahead as their samples may be old then."""
        how = self._begun(step)
        for later in range(step + 1, min(step + 1 + self._ahead, self._config.steps)):
            self._begun(later)
        run_id = how.run_id
        self._wait(step, run_id)
        if self._trainer is None:
            self._wait_for_trainer(step, run_id)
        elif training.committed_version(self._database, run_id) is None:
            self._train(step, how)
        version = training.committed_version(self._database, run_id)
        if version is None:
            self._view.trouble(f"step {step}: nothing to train on: {training.why_nothing(self._database, run_id)}")
        result = FinishedStep(step, run_id, version, training.figures(self._database, run_id))
        self._view.done(result)
        return result

    def _wait(self, step: int, run_id: UUID) -> None:
        """Until every group is complete, or nothing can come of it."""
        while training.groups_going(self._database, run_id):
            self._lock.hold()  # a lost connection frees it
            so_far = training.figures(self._database, run_id, so_far=True)
            self._view.progress(step, "rollouts", progress_of(self._database, [run_id]), so_far)
            time.sleep(_LOOK_S)

    def _train(self, step: int, how: ExperienceRun) -> None:
        """Everything of a step that was complete is one lease, trained on at once and committed at once."""
        assert self._trainer is not None
        if self._bounded:
            # What was published already was trained on these groups, which its being live must not make too old.
            how = replace(how, max_staleness=self._ahead + (self._live_version(step) is not None))
        consumer = f"megaflow train {self._config.name}"
        handed = Experience(self._database, self._store, how, consumer=consumer, lease_s=_LEASE_S)
        handed.release()  # what a killed loop had
        if (batch := handed.next_batch(self._config.groups)) is None:
            return
        if not self._trainer.is_trained(step) and self._live_version(step) is None:
            self._view.progress(step, "training", None)
            self._trainer.train(step, batch.groups())
        self._view.progress(step, "publishing", None)
        handed.commit(batch, self._publish(step))

    def _wait_for_trainer(self, step: int, run_id: UUID) -> None:
        """Until an external trainer has committed every group, and its version, or a newer one, is live."""
        while (counts := experience.counts(self._database, run_id)).ready or counts.leased:
            what = f"external trainer: {counts.ready} groups ready, {counts.leased} leased"
            self._lock.hold()
            self._view.progress(step, what, None, training.figures(self._database, run_id, so_far=True))
            time.sleep(_LOOK_S)
        version = training.committed_version(self._database, run_id)
        if version is None:
            return
        while (state := training.reached(self._database, self._config.policy, version)) != "live":
            self._lock.hold()
            how = "was refused: publish a newer version" if state == "refused" else "is not live yet"
            self._view.progress(step, f"external trainer: version {version} {how}", None)
            time.sleep(_LOOK_S)

    # --- Versions ---------------------------------------------------------------------------------------------------

    def _publish(self, step: int) -> str:
        """The version with the weights after a step, which is live then. Raises: SampleRefused: under every name."""
        assert self._trainer is not None
        refusal: SampleRefused | None = None
        for version in self._names(step):
            state = training.version_state(self._database, self._config.policy, version)
            if state == "live":
                return version
            if state == "refused":
                continue
            try:
                self._trainer.publish(step + 1, version)
            except SampleRefused as error:
                refusal = error
                self._view.trouble(str(error))
                continue
            return version
        raise refusal or SampleRefused(
            f"expected engines of {self._config.policy!r} that take the weights of step {step}, found that all of"
            f" {self._names(step)} were refused: see why (`megaflow models list`), then choose another `name`"
        )

    def _live_version(self, step: int) -> str | None:
        """The version of a step, when it has been published; None: it has not."""
        for version in self._names(step):
            if training.version_state(self._database, self._config.policy, version) == "live":
                return version
        return None

    def _names(self, step: int) -> list[str]:
        """What a step's version may be called: `NAME-3` after the third, `NAME-3.1` when that was refused."""
        first = f"{self._config.name}-{step + 1}"
        return [first, *(f"{first}.{number}" for number in range(1, _MOST_NAMES))]

    def _key(self, step: int) -> str:
        return key_of(self._config, step)
