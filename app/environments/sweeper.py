"""The net under the net: removes environments whose instance is gone or whose deadline has passed."""

from __future__ import annotations

import json
import math
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import structlog

from app.environments import snapshots
from app.environments.compose.sweeping import shared
from app.environments.engine import ROLE, Engine, engine_of
from app.environments.listing import READY, attempt_in, label_id, label_ready, listed, unix_of
from app.environments.local import OWNER, end
from app.environments.oci import Records, remove_abandoned
from app.environments.oci import end as end_environment
from app.environments.oci.records import Record
from app.errors import EngineUnavailable, EnvironmentFailed, StationError
from app.ledger import receipts
from app.ledger.database import Database
from app.ledger.owners import Taker, takers
from app.ledger.receipts import ObjectKind, Owner, Remover, Thing
from app.settings import Settings

log = structlog.get_logger()

_JUST_MADE_S = 1.0
"""The same for scratch folders, which are looked at first."""
_CGROUPS_S = 600.0
"""Between two looks for control groups whose home is gone."""
_YOUNG_S = 3.0
"""Its instance may be newer than the list of live ones that we were given."""


class Sweeper:
    """Looks at what exists on this host and its engine, not at what somebody remembers.

    database: where the removals are recorded; None: they are not.
    """

    def __init__(self, settings: Settings, database: Database | None = None) -> None:
        self._settings = settings
        self._database = database
        self._cgroups_next = 0.0  # monotonic

    def sweep(self, live_instances: set[UUID], ended: Collection[UUID] = ()) -> int:
        """Remove what belongs to no live instance or is overdue; how many. Instances are their provider's to end.

        What belongs to an instance that is known to have `ended` goes at once, else it is left alone while it is young.
        What is on record as standing and is not there is recorded as gone. An engine that does not answer has nothing
        to sweep.
        """
        owners = _Owners({str(one) for one in live_instances}, {str(one) for one in ended})
        self._sweep_scratch(owners)
        removed = [*self._sweep_folders(owners), *self._sweep_engineless(owners), *self._sweep_containers(owners)]
        if self._database is not None:
            with self._database.begin() as connection:
                receipts.destroyed(connection, [thing for thing in removed if thing], Remover.SWEEPER)
            self._settle(self._database)
        return len(removed) + self._sweep_snapshots(owners)

    def _sweep_scratch(self, owners: _Owners) -> None:
        """Remove what attempts of instances that are gone kept beside their environments."""
        for folder in (self._settings.home / "scratch").glob("*-*-*-*-*"):
            with suppress(OSError):  # going already
                if owners.lack(folder.name, folder.stat().st_mtime, _JUST_MADE_S):
                    shutil.rmtree(folder)

    def _sweep_containers(self, owners: _Owners) -> list[Thing | None]:
        """A thing whose labels do not say whose it was has no line: None."""
        labels = [f"megaflow={self._settings.installation}", f"{ROLE}=environment"]
        removed: list[Thing | None] = []
        try:
            engine = engine_of(self._settings)
            with engine.named("sweep environments", EnvironmentFailed):
                containers = engine.api.containers(all=True, filters={"label": labels})
                taken = self._takers(containers)
                for found in containers:
                    one = _Found.of(found, taken)
                    if one.doomed(owners):
                        log.warning("environment.swept", environment=one.id)
                        engine.remove(one.id)
                        removed.append(_thing(ObjectKind.CONTAINER, one.id, one.labels, one.made_unix_s))
                removed += self._sweep_shared(engine, owners)
        except (EngineUnavailable, EnvironmentFailed) as error:
            log.debug("sweeper.engine_failed", reason=str(error))
        return removed

    def _sweep_shared(self, engine: Engine, owners: _Owners) -> Iterator[Thing | None]:
        """Networks and volumes of projects. The engine keeps what is in use: its project lives, or goes first."""
        for found in shared(engine, self._settings.installation):
            made = unix_of(found.created)
            one = _Found(found.id, found.labels, made, float(found.labels["megaflow.deadline"]))
            if one.doomed(owners) and found.remove(engine):
                log.warning("environment.swept", **{found.kind: found.id})
                yield _thing(ObjectKind(found.kind), found.id, found.labels, made)

    def _takers(self, containers: Sequence[dict[str, Any]]) -> dict[UUID, Taker]:
        """Who has those that were made for nobody: their labels cannot say it, their names do."""
        named = {attempt_in(_name(one)) for one in containers if label_ready(one["Labels"])} - {None}
        attempts = [attempt for attempt in named if attempt is not None]
        return {} if self._database is None else takers(self._database, attempts)

    def _sweep_folders(self, owners: _Owners) -> list[Thing | None]:
        removed = []
        for file in (self._settings.home / "local").glob(f"*/{OWNER}"):
            try:
                labels: dict[str, str] = json.loads(file.read_text())["labels"]
                made = file.stat().st_mtime
            except (OSError, ValueError, KeyError):  # going, or half written: the next sweep sees it
                continue
            ours = labels["megaflow"] == self._settings.installation
            one = _Found(file.parent.name, labels, made, float(labels["megaflow.deadline"]))
            if ours and one.doomed(owners):
                log.warning("environment.swept", environment=file.parent.name)
                end(file.parent)
                removed.append(_thing(ObjectKind.FOLDER, file.parent.name, labels, made))
        return removed

    def _sweep_engineless(self, owners: _Owners) -> list[Thing | None]:
        """What stands here without an engine."""
        home = self._settings.home.resolve()
        removed: list[Thing | None] = []
        records = Records(home)
        for one in list(records.all()):
            ours = one.installation == self._settings.installation
            found = _Found(one.id, one.labels, _given(records, one), one.deadline_unix_s or math.inf)
            # Without labels it was being made when its maker died.
            if not one.labels or (ours and found.doomed(owners)):
                try:
                    end_environment(home, one.id)
                except EnvironmentFailed as error:  # the next sweep tries again
                    log.error("sweeper.environment_stays", environment=one.id, reason=str(error))
                    continue
                log.warning("environment.swept", environment=one.id)
                removed.append(_thing(ObjectKind.ENVIRONMENT, one.id, one.labels, one.made_unix_s))
        if time.monotonic() >= self._cgroups_next:
            remove_abandoned()
            self._cgroups_next = time.monotonic() + _CGROUPS_S
        return removed

    def _sweep_snapshots(self, owners: _Owners) -> int:
        """What environments stand on yet loses its name, and goes with a later sweep."""
        removed = 0
        for one in snapshots.standing(self._settings):
            doomed = _Found(one.id, one.labels, one.made_unix_s, one.deadline_unix_s).doomed(owners)
            if not (doomed or one.removed):
                continue
            try:
                one.remove()
            except StationError as error:  # the next sweep tries again
                log.warning("sweeper.snapshot_stays", snapshot=one.id, reason=str(error))
                continue
            if not one.removed:
                log.warning("environment.snapshot_swept", snapshot=one.id)
                removed += 1
        return removed

    def _settle(self, database: Database) -> None:
        """The ledger is read first: what is recorded after our look at the world is newer than it."""
        standing = receipts.open_in_sight(database, socket.gethostname())
        if not standing:
            return
        there, engine = listed(self._settings)
        ids = {thing.id for thing in there}
        gone = [one for one, kind in standing if one not in ids and (engine or not kind.engines)]
        with database.begin() as connection:
            receipts.vanished(connection, gone)


def _thing(kind: ObjectKind, identity: str, labels: Mapping[str, str], made: float) -> Thing | None:
    run, task, attempt, instance = (label_id(labels, part) for part in ("run", "task", "attempt", "instance"))
    if run is None or task is None or attempt is None or instance is None:
        return None
    return Thing(kind, identity, Owner(run, task, attempt, instance), datetime.fromtimestamp(made, UTC))


@dataclass(frozen=True, slots=True)
class _Owners:
    """Whom things may belong to: instance ids as labels have them."""

    live: set[str]
    ended: set[str]

    def lack(self, instance_id: str | None, made: float, young_s: float) -> bool:
        """True when this owner is gone; one that is in neither list may be newer than the lists."""
        return instance_id in self.ended or (instance_id not in self.live and time.time() - made > young_s)


@dataclass(frozen=True, slots=True)
class _Found:
    """An environment, whose it is, and since when: one that changed hands is as young as its taker's claim to it."""

    id: str
    labels: dict[str, str]
    made_unix_s: float
    deadline_unix_s: float
    taken: bool = False  # by an instance that lived just now, whatever older lists say

    @classmethod
    def of(cls, container: dict[str, Any], takers: Mapping[UUID, Taker]) -> _Found:
        labels, made = container["Labels"], float(container["Created"])
        attempt = attempt_in(_name(container)) if label_ready(labels) else None
        taker = None if attempt is None else takers.get(attempt)
        if taker is None:
            return cls(container["Id"], labels, made, _deadline(container))
        owner = {f"megaflow.{part.removesuffix('_id')}": str(found) for part, found in taker.owner._asdict().items()}
        labels = {name: value for name, value in labels.items() if name != READY} | owner
        return cls(container["Id"], labels, made, _deadline(container), taken=taker.lives)

    def doomed(self, owners: _Owners) -> bool:
        """What was made for nobody has no owner who could be gone: its deadline alone tells."""
        if time.time() > self.deadline_unix_s:
            return True
        if label_ready(self.labels) or self.taken:
            return False
        return owners.lack(self.labels.get("megaflow.instance"), self.made_unix_s, _YOUNG_S)


def _given(records: Records, one: Record) -> float:
    """When it was made, or given to whoever has it: an instance newer than the list of live ones may have taken it."""
    try:
        return max(one.made_unix_s, records.place(one.id).stat().st_mtime)
    except FileNotFoundError:  # going
        return one.made_unix_s


def _name(container: dict[str, Any]) -> str:
    return str(container["Names"][0]) if container["Names"] else ""


def _deadline(container: dict[str, Any]) -> float:
    """From the name, which a container that changed hands got anew; else from the label, which it could not."""
    for text in (_name(container).rpartition("-")[2], container["Labels"].get("megaflow.deadline", "")):
        if text.isdigit():
            return float(text)
    return float("inf")
