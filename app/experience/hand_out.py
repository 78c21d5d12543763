"""Hands a training run's groups out to one trainer, under leases that are committed once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog

from app.artifacts.base import ArtifactStore
from app.errors import ArtifactMissing, SampleRefused
from app.experience import files
from app.experience.adapters.rows import Row, by_group
from app.ledger import experience, staleness, training
from app.ledger.database import Database
from app.ledger.experience import ExperienceCounts, ExperienceRun, Lease

log = structlog.get_logger()

LOOK_S = 0.2
"""Seconds between two checks for a complete group."""
MOST_GROUPS = 4096
"""Limit of the groups of one batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups under one lease. `content` is a Parquet file of all their samples (`app.experience.files.SCHEMA`)."""

    lease: Lease
    content: bytes

    def groups(self) -> Mapping[str, Sequence[Row]]:
        """Returns the samples as rows, by the id of their group."""
        return by_group(files.read(self.content))


def content_of(database: Database, store: ArtifactStore, lease: Lease) -> bytes | None:
    """Reads a lease's samples as one file. None: a file is missing or damaged; its group is lost, the rest released.

    Raises: ArtifactMissing: none of its files is here, as with another store than the worker's; nothing is lost;
        ArtifactStoreUnavailable, DatabaseUnavailable.
    """
    tables, faults = [], dict[str, ArtifactMissing | SampleRefused]()
    for key in lease.keys:
        try:
            tables.append(files.table_of(store.get(key)))
        except (ArtifactMissing, SampleRefused) as error:
            faults[key] = error
    if not faults:
        return files.joined(tables)
    key, fault = next(iter(faults.items()))
    if not tables and isinstance(fault, ArtifactMissing):
        raise fault
    log.warning("experience.lost", key=key, reason=str(fault))
    staleness.set_lost(database, lease.id, key, str(fault))
    return None


class Experience:
    """The samples of one training run, for one trainer at a time."""

    def __init__(
        self, database: Database, store: ArtifactStore, run: ExperienceRun, *, consumer: str, lease_s: float = 600.0
    ) -> None:
        """lease_s: seconds without commit or renewal after which groups are offered again.

        Raises: UnknownName; SampleRefused: the run's purpose is not `training`; DatabaseUnavailable.
        """
        experience.open_run(database, run)
        self._database = database
        self._store = store
        self._run_id: UUID = run.run_id
        self._policy = run.policy
        self._consumer = consumer
        self._lease_s = lease_s
        self.groups_left: int | None = None
        """Groups that may still be trained on, with those under lease, at the last `next_batch`."""

    def next_batch(self, groups: int, *, wait_s: float = 0.0) -> Batch | None:
        """Returns at most `groups` complete groups, the oldest first. None: none was complete within `wait_s`.

        A group whose samples cannot be read is set aside as `lost`.

        Raises: SampleRefused: another consumer has the run, or `groups` is invalid; ArtifactMissing: no sample is in
            this store; ArtifactStoreUnavailable, DatabaseUnavailable: nothing is lost, the lease expires.
        """
        if type(groups) is not int or not 1 <= groups <= MOST_GROUPS:
            raise SampleRefused(f"expected a number of groups from 1 to {MOST_GROUPS}, found {groups!r}")
        if not wait_s >= 0:  # NaN fails, too
            raise SampleRefused(f"expected seconds to wait of at least 0, found {wait_s!r}")
        until = time.monotonic() + wait_s
        while True:
            lease = experience.next_batch(
                self._database, self._run_id, self._consumer, groups=groups, lease_s=self._lease_s
            )
            content = None if lease is None else content_of(self._database, self._store, lease)
            if content is not None or (lease is None and time.monotonic() >= until):
                self.groups_left = training.groups_left(self._database, self._run_id)
                return None if lease is None or content is None else Batch(lease, content)
            time.sleep(LOOK_S)

    def renew(self, batch: Batch) -> None:
        """Renews a batch's lease. Raises: SampleRefused: it has expired or is committed."""
        experience.renew(self._database, batch.lease.id, lease_s=self._lease_s)

    def commit(self, batch: Batch, version: str) -> None:
        """Commits a batch as trained into `version`; final, and safe to repeat.

        Raises: SampleRefused: its lease has expired: discard the step, the groups are offered again.
        """
        experience.commit(self._database, batch.lease.id, version)

    def publish(self, version: str) -> int:
        """Records a version of the policy and returns its number. Raises: SampleRefused."""
        return experience.publish(self._database, self._policy, version)

    def counts(self) -> ExperienceCounts:
        return experience.counts(self._database, self._run_id)

    def release(self) -> None:
        """Frees the run for another trainer; leased groups are offered again."""
        experience.release(self._database, self._run_id, self._consumer)
