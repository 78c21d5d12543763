"""Runs the steps of a training run, each from where it stopped: a killed loop continues at the last committed step.

The state of a step is read from PostgreSQL and from the trainer's folder, never kept in memory: its run by the
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
"""Long, because a step's groups are only for this loop; a restarted loop releases them first."""
_MOST_NAMES = 4
"""Limit of names for a version. A refused name stays refused, even if an engine was only away: weights get another."""
_MOST_EMPTY = 3
"""Limit of steps without a sample, one after the other."""
_PATIENCE_S = 900.0
"""Seconds for which a service that does not answer is retried."""
_AWAY = (DatabaseUnavailable, ArtifactStoreUnavailable, ModelEndpointUnavailable)
AnyResult = TypeVar("AnyResult")


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A finished step. version None: no group had anything to train on."""

    step: int
    run_id: UUID
    version: str | None
    figures: StepFigures


class LoopView(Protocol):
    """View of a loop's progress."""

    def progress(self, step: int, what: str, now: Progress | None, so_far: StepFigures | None = None) -> None: ...

    def done(self, result: FinishedStep) -> None: ...

    def trouble(self, text: str) -> None: ...


class TrainingLoop:
    """Loop of one training run. Only one process has it at a time."""

    def __init__(self, flow: MegaFlow, config: TrainConfig, view: LoopView, *, beside: Path) -> None:
        """config: `TrainConfig.effective`. beside: the folder of its file."""
        self._flow, self._config, self._view, self._beside = flow, config, view, beside
        self._database = flow.database
        self._store = open_store(flow.settings.artifacts(), endpoint_url=flow.settings.s3_endpoint_url)
        self._bounded = config.trainer.kind is not TrainerKind.NONE
        self._ahead = config.max_staleness or 0  # steps
        self._trainer: StepTrainer | None = None  # it writes files: created when the lock is held
        self._lock = LoopLock(flow.database, config.name)

    def run(self) -> list[FinishedStep]:
        """Runs what is left of all steps, and returns the results of all.

        Raises: LimitInvalid: another process runs it; SampleRefused: several steps had no sample, or a version is
            refused; DependencyMissing, SpecInvalid: there is no such trainer; UnknownName: no engines of the policy;
            as `MegaFlow.accept`; errors of a service that does not answer for 15 minutes.
        """
        if self._bounded:
            engines_of(self._config, self._database)
        self._lock.hold()
        try:
            self._trainer = trainer_of(self._config, self._flow.settings, self._database, self._beside)
            self._patiently(0, self._first_version)
            results: list[FinishedStep] = []
            for step in range(self._config.steps):
                results.append(self._patiently(step, self._step))
                self._refuse_to_go_on_for_nothing(results[-_MOST_EMPTY:])
            return results
        finally:
            self._lock.close()

    def _patiently(self, step: int, work: Callable[[int], AnyResult]) -> AnyResult:
        """Retries work while a service is away. Repeated work does only what was left undone, and nothing twice."""
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
        """Publishes the policy's weights before the first step, so that their answers have a version."""
        if self._trainer is not None and training.run_of(self._database, self._config.user_name, self._key(0)) is None:
            self._publish(-1)

    def _begun(self, step: int) -> ExperienceRun:
        """Returns a step's run, accepted and open for the trainer."""
        run_id = training.run_of(self._database, self._config.user_name, self._key(step))
        if run_id is None:
            self._view.progress(step, "drawing tasks", None)
            plan = plan_step(self._config, step, self._flow.settings, self._database)
            run_id = self._flow.accept(plan.run).id
        run = experience_of(self._config, run_id)
        experience.open_run(self._database, run)
        return run

    def _step(self, step: int) -> FinishedStep:
        """Runs a step. Also begins later steps, as many as the allowed staleness of their samples."""
        run = self._begun(step)
        for later in range(step + 1, min(step + 1 + self._ahead, self._config.steps)):
            self._begun(later)
        run_id = run.run_id
        self._wait(step, run_id)
        if self._trainer is None:
            self._wait_for_trainer(step, run_id)
        elif training.committed_version(self._database, run_id) is None:
            self._train(step, run)
        version = training.committed_version(self._database, run_id)
        if version is None:
            self._view.trouble(f"step {step}: nothing to train on: {training.why_nothing(self._database, run_id)}")
        result = FinishedStep(step, run_id, version, training.figures(self._database, run_id))
        self._view.done(result)
        return result

    def _wait(self, step: int, run_id: UUID) -> None:
        """Waits until every group is complete, or cannot become complete."""
        while training.groups_going(self._database, run_id):
            self._lock.hold()  # a lost connection frees the lock
            so_far = training.figures(self._database, run_id, so_far=True)
            self._view.progress(step, "rollouts", progress_of(self._database, [run_id]), so_far)
            time.sleep(_LOOK_S)

    def _train(self, step: int, how: ExperienceRun) -> None:
        """Trains on all complete groups of a step: under one lease, in one update, with one commit."""
        assert self._trainer is not None
        if self._bounded:
            # A version that is published already was trained on these groups: being live must not make them too old.
            how = replace(how, max_staleness=self._ahead + (self._live_version(step) is not None))
        consumer = f"megaflow train {self._config.name}"
        samples = Experience(self._database, self._store, how, consumer=consumer, lease_s=_LEASE_S)
        samples.release()  # leases of a killed loop
        if (batch := samples.next_batch(self._config.groups)) is None:
            return
        if not self._trainer.is_trained(step) and self._live_version(step) is None:
            self._view.progress(step, "training", None)
            self._trainer.train(step, batch.groups())
        self._view.progress(step, "publishing", None)
        samples.commit(batch, self._publish(step))

    def _wait_for_trainer(self, step: int, run_id: UUID) -> None:
        """Waits until an external trainer has committed every group, and its version, or a newer one, is live."""
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
            status = "was refused: publish a newer version" if state == "refused" else "is not live yet"
            self._view.progress(step, f"external trainer: version {version} {status}", None)
            time.sleep(_LOOK_S)

    def _publish(self, step: int) -> str:
        """Publishes the weights after a step, returns the live version. Raises: SampleRefused: under every name."""
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
        """Returns the live version of a step. None: there is none yet."""
        for version in self._names(step):
            if training.version_state(self._database, self._config.policy, version) == "live":
                return version
        return None

    def _names(self, step: int) -> list[str]:
        """Returns the names for a step's version: `NAME-3` after the third, `NAME-3.1` if that was refused."""
        first = f"{self._config.name}-{step + 1}"
        return [first, *(f"{first}.{number}" for number in range(1, _MOST_NAMES))]

    def _key(self, step: int) -> str:
        return key_of(self._config, step)
