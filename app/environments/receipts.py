"""Records in the ledger which environments an attempt created and destroyed.

Its worker, the pool, or a cancel from another thread calls `destroy`, which updates the receipt. A line
that cannot be written does not fail the attempt: the sweeper writes it when it finds or removes the environment.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from app.environments.contract import Environment, EnvironmentProvider, Tags
from app.errors import DatabaseUnavailable, StationError
from app.ledger import receipts
from app.ledger.database import Database
from app.ledger.receipts import NewResource, ObjectKind, Owner, Remover
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings

log = structlog.get_logger()

_OBJECTS = {"local": ObjectKind.FOLDER, "oci": ObjectKind.ENVIRONMENT, "kubernetes": ObjectKind.POD}
"""Object kind of an environment in its receipt; any other environment kind is a container."""


class LedgerReceipt:
    """The receipt lines of one environment: itself, its volumes, its other services and their network."""

    def __init__(self, environment: Environment, lines: list[NewResource], owner: Owner, database: Database) -> None:
        self._environment = environment
        self._lines = lines
        self._owner = owner
        self._database = database

    def was_reset(self) -> None:
        try:
            current = _of_services(self._environment, self._owner)
            if current is None:
                return
            ids = {line.id for line in current}
            with self._database.begin() as connection:
                receipts.destroyed(connection, [one for one in self._lines if one.id not in ids], Remover.WORKER)
                receipts.created(connection, current)
            self._lines = current
        except (DatabaseUnavailable, StationError) as error:
            log.warning("environment.not_recorded", environment=self._environment.id, error=str(error))

    def was_destroyed(self) -> None:
        try:  # a second time changes nothing: the first end counts
            with self._database.begin() as connection:
                receipts.destroyed(connection, self._lines, Remover.WORKER)
        except DatabaseUnavailable as error:
            log.warning("environment.end_not_recorded", environment=self._environment.id, error=str(error))


class EnvironmentRecorder:
    """Creates environments that are recorded as soon as they exist."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database

    def create(
        self, provider: EnvironmentProvider, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float
    ) -> Environment:
        """Creates an environment as `EnvironmentProvider.create` does. An unreachable ledger does not fail it."""
        begun, owner = time.time(), owner_of(tags)
        environment = provider.create(spec, tags, timeout_s=timeout_s)
        try:
            own, shared = self._lines(environment, owner, spec, begun)
            with self._database.begin() as connection:
                receipts.created(connection, [*own, *shared])
        except DatabaseUnavailable as error:
            log.warning("environment.not_recorded", environment=environment.id, error=str(error))
        except BaseException:
            with suppress(StationError):  # the sweeper finds it by its label
                environment.destroy()
            raise
        environment.receipt = LedgerReceipt(environment, own, owner, self._database)
        return environment

    def _lines(
        self, environment: Environment, owner: Owner, spec: EnvironmentSpec, begun: float
    ) -> tuple[list[NewResource], list[NewResource]]:
        """Returns lines of its own objects, and of objects that stay for others (an installation's first network)."""
        if (lines := _of_services(environment, owner)) is not None:
            return lines, []
        identity, now = environment.id, datetime.now(UTC)
        kind = _OBJECTS.get(environment.describe()["kind"], ObjectKind.CONTAINER)
        own, shared = [NewResource(kind, identity, owner, now)], list[NewResource]()
        if not kind.engines:
            return own, shared
        from app.environments import listing  # the engine's client is not installed everywhere

        try:
            volumes = listing.volumes_of(self._settings, identity)
            own += [NewResource(ObjectKind.VOLUME, name, owner, now) for name in volumes]
            if spec.network is Network.OPEN:
                networks = listing.networks_since(self._settings, begun - 1.0)
                shared = [NewResource(ObjectKind.NETWORK, name, owner, now) for name in networks]
        except StationError as error:  # its first command shows whether it works
            log.warning("environment.not_listed", environment=identity, error=str(error))
        return own, shared


def _of_services(environment: Environment, owner: Owner) -> list[NewResource] | None:
    created, now = environment.created_resources(), datetime.now(UTC)
    if created is None:
        return None
    kinds = {
        ObjectKind.CONTAINER: (environment.id, *(one for one in created.containers if one != environment.id)),
        ObjectKind.NETWORK: created.networks,
        ObjectKind.VOLUME: created.volumes,
    }
    return [NewResource(kind, one, owner, now) for kind, ids in kinds.items() for one in ids]


def owner_of(tags: Tags) -> Owner:
    """Returns the attempt that the receipt names."""
    assert tags.run_id is not None
    assert tags.task_id is not None
    assert tags.attempt_id is not None
    return Owner(tags.run_id, tags.task_id, tags.attempt_id, tags.instance_id)
