"""Makes the samples of ended attempts: reads their recorded calls, stores one Parquet file each, puts it on record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import structlog

from app.artifacts.base import ArtifactStore
from app.errors import ArtifactMissing, ArtifactStoreUnavailable, DatabaseUnavailable, DiskFull, SampleRefused
from app.experience import files
from app.experience.files import SampleSource
from app.experience.samples import Sample, samples_of
from app.ledger import experience, training
from app.ledger.database import Database
from app.ledger.experience import EndedAttempt, StoredSamples
from app.model_service.trajectory import artifact

log = structlog.get_logger()

_AT_ONCE = 200
_PAUSE_S = 0.5
_SETTLED_S = 30.0
"""A run whose tasks have all ended and are on record is looked at again after this time: a task may be tried again."""
_THREADS = 4
"""Most of an attempt's time is waiting for two disks: the store's and PostgreSQL's."""


class SampleMaker:
    """Any number may run: what two make of one attempt is the same, and is put on record once."""

    def __init__(self, database: Database, store: ArtifactStore, nudge: Callable[[Sequence[UUID]], None]) -> None:
        """nudge: tells running attempts to stop, which their group no longer needs."""
        self._nudge = nudge
        self._database = database
        self._store = store
        self._settled: list[UUID] = []
        self._look_again_at = 0.0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="samples")

    def run(self, stop: threading.Event) -> None:
        """Make samples until told to stop."""
        while not stop.is_set():
            try:
                busy = self.pass_once() == _AT_ONCE
            except (DatabaseUnavailable, ArtifactStoreUnavailable, DiskFull) as error:  # asked again: nothing is lost
                log.warning("experience.postponed", error=str(error))
                busy = False
            if not busy:
                stop.wait(_PAUSE_S)

    def pass_once(self) -> int:
        """Attempts that were looked at. Raises: DatabaseUnavailable, ArtifactStoreUnavailable, DiskFull."""
        if time.monotonic() >= self._look_again_at:
            self._settled = training.settled_runs(self._database)
            self._look_again_at = time.monotonic() + _SETTLED_S
        found = experience.ended_attempts(self._database, _AT_ONCE, self._settled)
        for _ in self._threads.map(self._keep, found):
            pass
        return len(found)

    def _keep(self, ended: EndedAttempt) -> None:
        reason, made = ended.unusable, None
        if not reason:
            try:
                made = self._made(ended)
            except (SampleRefused, ArtifactMissing) as error:
                reason = str(error)
                log.warning("experience.refused", task=ended.task, attempt_id=str(ended.attempt_id), reason=reason)
        if needless := experience.record(self._database, ended, made, reason):
            self._nudge(needless)

    def _made(self, ended: EndedAttempt) -> StoredSamples:
        assert ended.calls_key is not None
        assert ended.reward is not None
        try:
            calls = artifact.read(self._store.get(ended.calls_key))
        except ValueError as error:
            raise SampleRefused(str(error)) from error
        samples = [one for one in samples_of(calls) if one.trained]
        if not samples:
            raise SampleRefused("expected tokens of the policy, found empty answers alone")
        source = SampleSource(
            run_id=ended.run_id,
            group_id=ended.group_id,
            task_id=ended.task_id,
            attempt_id=ended.attempt_id,
            task=ended.task,
            framework=ended.agent,
            reward=ended.reward,
            reward_parts=ended.reward_parts,
            end_reason=ended.end_reason,
        )
        key = f"runs/{ended.run_id}/{ended.task_id}/{ended.number}/samples.parquet"
        self._store.put(key, files.write(source, samples))
        return _summary(key, samples)


def _summary(key: str, samples: list[Sample]) -> StoredSamples:
    versions = dict.fromkeys(span.version for sample in samples for span in sample.versions)
    return StoredSamples(
        key=key,
        samples=len(samples),
        tokens=sum(len(sample.token_ids) for sample in samples),
        trained_tokens=sum(sample.trained for sample in samples),
        versions=tuple(versions),
    )
