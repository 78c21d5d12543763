"""Makes the samples of ended attempts: reads their recorded calls, stores one Parquet file each, and records it."""

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
from app.experience.samples import Sample, samples_of
from app.ledger import experience, training
from app.ledger.database import Database
from app.ledger.experience import EndedAttempt, StoredSamples
from app.model_service.trajectory import artifact

log = structlog.get_logger()

_AT_ONCE = 200
_PAUSE_S = 0.5
_SETTLED_S = 30.0
"""Seconds until a run whose tasks have all ended and are recorded is checked again: a task may be retried."""
_THREADS = 4
"""Several, as most of an attempt's time is waiting for two disks: the store's and PostgreSQL's."""


class SampleMaker:
    """Maker of samples. Any number may run: two make the same of one attempt, and it is recorded once."""

    def __init__(self, database: Database, store: ArtifactStore, nudge: Callable[[Sequence[UUID]], None]) -> None:
        """nudge: stops running attempts that their group no longer needs."""
        self._nudge = nudge
        self._database = database
        self._store = store
        self._settled: list[UUID] = []
        self._look_again_at = 0.0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="samples")

    def run(self, stop: threading.Event) -> None:
        """Makes samples until `stop` is set."""
        while not stop.is_set():
            try:
                busy = self.pass_once() == _AT_ONCE
            except (DatabaseUnavailable, ArtifactStoreUnavailable, DiskFull) as error:  # retried: nothing is lost
                log.warning("experience.postponed", error=str(error))
                busy = False
            if not busy:
                stop.wait(_PAUSE_S)

    def pass_once(self) -> int:
        """Makes samples, returns how many attempts. Raises: DatabaseUnavailable, ArtifactStoreUnavailable, DiskFull."""
        if time.monotonic() >= self._look_again_at:
            self._settled = training.settled_runs(self._database)
            self._look_again_at = time.monotonic() + _SETTLED_S
        attempts = experience.ended_attempts(self._database, _AT_ONCE, self._settled)
        for _ in self._threads.map(self._keep, attempts):
            pass
        return len(attempts)

    def _keep(self, ended: EndedAttempt) -> None:
        reason, stored = ended.unusable, None
        if not reason:
            try:
                stored = self._made(ended)
            except (SampleRefused, ArtifactMissing) as error:
                reason = str(error)
                log.warning("experience.refused", task=ended.task, attempt_id=str(ended.attempt_id), reason=reason)
        if needless := experience.record(self._database, ended, stored, reason):
            self._nudge(needless)

    def _made(self, ended: EndedAttempt) -> StoredSamples:
        assert ended.calls_key is not None
        try:
            calls = artifact.read(self._store.get(ended.calls_key))
        except ValueError as error:
            raise SampleRefused(str(error)) from error
        samples = [one for one in samples_of(calls) if one.trained]
        if not samples:
            raise SampleRefused("expected tokens of the policy, found empty answers alone")
        key = f"runs/{ended.run_id}/{ended.task_id}/{ended.number}/samples.parquet"
        self._store.put(key, files.write(ended, samples))
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
