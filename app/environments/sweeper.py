"""Removes environments whose instance has ended or whose deadline has passed."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import structlog

from app.environments.listing import ended_at, label_id, listed, made_of, name_of, pods_of, unix_of
from app.environments.runtimes.compose.resources import remove_container, shared
from app.environments.runtimes.local.processes import OWNER, owner_of, remove_environment, unowned_folders
from app.environments.runtimes.oci import Records, remove_abandoned
from app.environments.runtimes.oci import end as end_environment
from app.errors import EngineUnavailable, EnvironmentFailed, StationError
from app.host.engine import ROLE, Engine, engine_of
from app.host.environment_records import Record
from app.ledger import host_images, receipts
from app.ledger.database import Database
from app.ledger.receipts import NewResource, ObjectKind, Owner, Remover
from app.settings import Settings

log = structlog.get_logger()

_JUST_MADE_S = 1.0
"""Like `_YOUNG_S`, for scratch folders, which are checked first."""
_CGROUPS_S = 600.0
"""Seconds between two searches for control groups whose home no longer exists."""
_YOUNG_S = 3.0
"""Age in seconds up to which its instance may be newer than the given list of live ones."""
_ENDED_S = 600.0
"""Seconds between the end of a pod and its removal: its attempt still asks how it ended."""
_NAMES = {ObjectKind.NETWORK: "network", ObjectKind.VOLUME: "volume"}
"""Names in the log for objects that are not environments."""


class SweepRefusal(NamedTuple):
    """An object that could not be removed, and why. `instance_id`: its owner, if its labels name one."""

    kind: str
    id: str
    why: str
    instance_id: UUID | None


@dataclass(frozen=True, slots=True)
class Swept:
    """Result of a round: how many environments and shared objects it removed, and which it could not remove."""

    removed: int
    refused: tuple[SweepRefusal, ...]


class Sweeper:
    """Removes what has no owner: looks at what exists on this host and its engine, not at records. For one thread.

    database: records the removals; None: they are not recorded. stop: when set, a round ends early.
    """

    def __init__(
        self, settings: Settings, database: Database | None = None, stop: threading.Event | None = None
    ) -> None:
        self._settings = settings
        self._database = database
        self._stop = stop or threading.Event()
        self._cgroups_next = 0.0  # monotonic
        self._removed = 0
        self._refused: list[SweepRefusal] = []
        self._last: frozenset[str] = frozenset()  # could not be removed last time; come last, as they may take long

    def sweep(
        self,
        live_instances: set[UUID],
        ended: Collection[UUID] = (),
        *,
        control: bool = True,
        read_at: float | None = None,
    ) -> Swept:
        """Removes what belongs to no live instance or is overdue. Instances themselves are ended by their provider.

        Objects of an instance that has `ended` are removed at once, those of an unknown instance once they are not
        young. Failed removals are tried again in the next round. Objects that the ledger lists here but that do not
        exist are recorded as gone; `control`: also those of instances that the control plane launched. `read_at`: when
        the live ones were read (Unix time), if not just now. An engine that does not answer has nothing to sweep.

        Raises: DatabaseUnavailable.
        """
        self._removed, self._refused = 0, []
        read_at = time.time() if read_at is None else read_at
        ahead_s = 0.0 if self._database is None else host_images.clock_ahead_s(self._database)
        owners = _Owners({str(one) for one in live_instances}, {str(one) for one in ended}, read_at, ahead_s)
        self._sweep_scratch(owners)
        self._sweep_folders(owners)
        self._sweep_engineless(owners)
        self._sweep_engine(owners)
        self._sweep_pods(owners)
        if self._database is not None:
            self._settle(self._database, control=control)
        self._last = frozenset(refusal.id for refusal in self._refused)
        return Swept(self._removed, tuple(self._refused))

    def _remove(self, kind: ObjectKind, one: _Candidate, remove: Callable[[], object]) -> None:
        """Calls `remove` (False: not yet); notes a refusal. Raises: EngineUnavailable, DatabaseUnavailable."""
        if self._stop.is_set():
            return
        try:
            if remove() is False:
                return
        except EngineUnavailable:
            raise
        except (StationError, OSError) as error:
            self._refuse(kind, one.id, error, label_id(one.labels, "instance"))
            return
        log.warning("environment.swept", **{_NAMES.get(kind, "environment"): one.id})
        self._removed += 1
        thing = _thing(kind, one.id, one.labels, one.made_unix_s)
        if self._database is not None and thing is not None:  # at once, before another process records it as vanished
            with self._database.begin() as connection:
                receipts.destroyed(connection, [thing], Remover.SWEEPER)

    def _refuse(self, kind: str, identity: str, error: Exception, instance_id: UUID | None) -> None:
        log.warning("sweeper.refused", kind=str(kind), id=identity, reason=str(error))
        self._refused.append(SweepRefusal(str(kind), identity, str(error), instance_id))

    def _sweep_scratch(self, owners: _Owners) -> None:
        for folder in (self._settings.home / "scratch").glob("*-*-*-*-*"):
            try:
                if owners.lack(folder.name, folder.stat().st_mtime, _JUST_MADE_S):
                    shutil.rmtree(folder)
            except FileNotFoundError:  # another process removes it
                continue
            except OSError as error:
                self._refuse("scratch", folder.name, error, label_id({"megaflow.instance": folder.name}, "instance"))

    def _sweep_folders(self, owners: _Owners) -> None:
        for file in (self._settings.home / "local").glob(f"*/{OWNER}"):
            try:
                labels, made_at = owner_of(file.parent).get("labels", {}), file.stat().st_mtime
            except OSError:  # being removed
                continue
            ours = labels.get("megaflow") == self._settings.installation  # not when it is half written
            one = _Candidate(file.parent.name, labels, made_at, _deadline_of(labels))
            if ours and one.doomed(owners):
                self._remove(ObjectKind.FOLDER, one, partial(remove_environment, file.parent))
        for folder in unowned_folders(self._settings.home):
            self._remove(
                ObjectKind.FOLDER, _Candidate(folder.name, {}, time.time(), 0.0), partial(remove_environment, folder)
            )

    def _sweep_engineless(self, owners: _Owners) -> None:
        home = self._settings.home.resolve()
        records = Records(home)
        for record in sorted(records.all(), key=lambda record: record.id in self._last):
            ours = record.installation == self._settings.installation
            one = _Candidate(record.id, record.labels, _given(records, record), record.deadline_unix_s or math.inf)
            # A record without labels: its maker died while making it.
            if not record.labels or (ours and one.doomed(owners)):
                one = replace(one, made_unix_s=record.made_unix_s)
                self._remove(ObjectKind.ENVIRONMENT, one, partial(end_environment, home, one.id))
        if time.monotonic() >= self._cgroups_next:
            remove_abandoned()
            self._cgroups_next = time.monotonic() + _CGROUPS_S

    def _sweep_engine(self, owners: _Owners) -> None:
        try:
            engine = engine_of(self._settings)
            self._sweep_containers(engine, owners)
            self._sweep_shared(engine, owners)
        except StationError as error:
            log.debug("sweeper.engine_failed", reason=str(error))

    def _sweep_containers(self, engine: Engine, owners: _Owners) -> None:
        labels = [f"megaflow={self._settings.installation}", f"{ROLE}=environment"]
        with engine.named("list environments", EnvironmentFailed):
            containers = engine.api.containers(all=True, filters={"label": labels})
        for container in sorted(containers, key=lambda container: container["Id"] in self._last):
            one = _Candidate.of(container)
            if one.doomed(owners):
                remove = partial(remove_container, engine, labels=container["Labels"])
                self._remove(ObjectKind.CONTAINER, one, partial(_removed_by, engine, remove, one.id))

    def _sweep_shared(self, engine: Engine, owners: _Owners) -> None:
        """Removes networks and volumes of projects. The engine keeps those in use: the project lives, or goes first."""
        with engine.named("list what projects share", EnvironmentFailed):
            standing = shared(engine, self._settings.installation)
        for part in standing:
            one = _Candidate(part.id, part.labels, unix_of(part.created), _deadline_of(part.labels))
            if one.doomed(owners):
                self._remove(ObjectKind(part.kind), one, partial(_removed_by, engine, part.remove, engine))

    def _sweep_pods(self, owners: _Owners) -> None:
        """Removes pods of the cluster, made by any host; also those that ended by themselves some time ago."""
        if not self._settings.in_cluster:
            return
        try:
            pods = pods_of(self._settings)
            from app.environments.runtimes.kubernetes.cluster import cluster_of  # of an extra, which is installed

            for pod in pods:
                labels = pod["metadata"]["labels"]
                deadline = min(_deadline_of(labels), ended_at(pod) + _ENDED_S)
                one = _Candidate(name_of(pod), labels, made_of(pod), deadline)
                if one.doomed(owners):
                    self._remove(ObjectKind.POD, one, partial(cluster_of(self._settings).delete_pod, one.id))
        except StationError as error:
            log.debug("sweeper.cluster_failed", reason=str(error))

    def _settle(self, database: Database, *, control: bool) -> None:
        """Records objects that no longer exist. The ledger is read first, so that no line is newer than the list."""
        standing = receipts.open_in_sight(database, self._settings.host(), control=control)
        if not standing:
            return
        there, silent = listed(self._settings)
        ids = {thing.id for thing in there}
        vanished = [one for one, kind in standing if one not in ids and kind.lister not in silent]
        with database.begin() as connection:
            receipts.vanished(connection, vanished)


def _removed_by(engine: Engine, remove: Callable[[Any], object], what: Any) -> object:
    """Calls `remove`, with errors in our words. An engine that works otherwise but fails for this object refuses it.

    Raises: EnvironmentFailed, DiskFull; EngineUnavailable: nothing else could be removed either.
    """
    try:
        with engine.named("sweep", EnvironmentFailed):
            return remove(what)
    except EngineUnavailable as error:
        if not engine.listens():
            raise
        raise EnvironmentFailed(str(error)) from error


def _thing(kind: ObjectKind, identity: str, labels: Mapping[str, str], made: float) -> NewResource | None:
    run, task, attempt, instance = (label_id(labels, part) for part in ("run", "task", "attempt", "instance"))
    if run is None or task is None or attempt is None or instance is None:
        return None
    return NewResource(kind, identity, Owner(run, task, attempt, instance), datetime.fromtimestamp(made, UTC))


@dataclass(frozen=True, slots=True)
class _Owners:
    """Possible owners of objects: instance ids as in labels, and when they were read (Unix time).

    ahead_s: how far the clock that set their deadlines is ahead of this host's.
    """

    live: set[str]
    ended: set[str]
    read_at: float
    ahead_s: float

    def lack(self, instance_id: str | None, made: float, young_s: float) -> bool:
        """Whether this owner is gone. An owner in neither list may be newer than the lists."""
        return instance_id in self.ended or (instance_id not in self.live and self.read_at - made > young_s)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An environment, its owner, and its age: one that changed hands counts from its new owner's claim."""

    id: str
    labels: dict[str, str]
    made_unix_s: float
    deadline_unix_s: float

    @classmethod
    def of(cls, container: dict[str, Any]) -> _Candidate:
        return cls(container["Id"], container["Labels"], float(container["Created"]), _deadline(container))

    def doomed(self, owners: _Owners) -> bool:
        """Whether to remove it. Without an attempt (a trial), only its deadline counts, by this host's clock."""
        trial = not self.labels.get("megaflow.attempt")
        if time.time() + (0.0 if trial else owners.ahead_s) > self.deadline_unix_s:
            return True
        return not trial and owners.lack(self.labels.get("megaflow.instance"), self.made_unix_s, _YOUNG_S)


def _given(records: Records, one: Record) -> float:
    """Returns when it was made or given to its owner, an instance that may be newer than the list of live ones."""
    try:
        return max(one.made_unix_s, records.place(one.id).stat().st_mtime)
    except FileNotFoundError:  # being removed
        return one.made_unix_s


def _deadline(container: dict[str, Any]) -> float:
    """Reads the deadline from the name, which is new after a change of hands, else from the fixed label."""
    text = container["Names"][0].rpartition("-")[2] if container["Names"] else ""
    return float(text) if text.isdigit() else _deadline_of(container["Labels"])


def _deadline_of(labels: Mapping[str, str]) -> float:
    text = labels.get("megaflow.deadline", "")
    return float(text) if text.isdigit() else math.inf
