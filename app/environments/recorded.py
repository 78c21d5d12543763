"""Environments whose making and end are on record: lines of their run's receipt.

Whoever ends one (its worker, the pool when it makes room, the worker's leaving, a cancel from another thread) goes
through `destroy`, and so does the record. A record that cannot be written is not worth the attempt: whoever removes
the thing, or finds it gone, makes up for the line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import structlog

from app.environments.contract import (
    Chronicling,
    CommandResult,
    Environment,
    EnvironmentProvider,
    Forward,
    Logging,
    MemoryCounting,
    ProcessCounting,
    ResetProof,
    Serve,
    ServiceMemory,
    ServicesCounting,
    Snapshot,
    Stats,
    Tags,
)
from app.environments.pool import Adoptable
from app.environments.runtimes.compose.services import Several
from app.environments.tools import versions_of
from app.errors import DatabaseUnavailable, EnvironmentFailed, StationError
from app.ledger import receipts
from app.ledger.database import Database
from app.ledger.receipts import ObjectKind, Owner, Remover, Thing
from app.models.shell import Interactive, OutputLogs, Shell, StatefulShell
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings

log = structlog.get_logger()


class RecordedEnvironment:
    """An environment that tells the ledger when it has been removed."""

    def __init__(self, environment: Environment, things: list[Thing], owner: Owner, database: Database) -> None:
        self._environment = environment
        self._things = things  # itself, and what goes with it: volumes, other services, their network
        self._owner = owner
        self._database = database

    @property
    def id(self) -> str:
        return self._environment.id

    def describe(self) -> dict[str, Any]:
        return self._environment.describe()

    def adopt(self, tags: Tags) -> None:
        """Show outside whose it is now, where it can."""
        if isinstance(self._environment, Adoptable):
            self._environment.adopt(tags)

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        return self._environment.run(command, cwd=cwd, env=env, timeout_s=timeout_s, stdin=stdin)

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        return self._environment.shell(cwd=cwd, env=env)

    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> Interactive:
        return self._environment.stream(argv, cwd=cwd, env=env, tty=tty, rows=rows, columns=columns)

    def get_tree(self, path: str) -> bytes:
        return self._environment.get_tree(path)

    def stats(self) -> Stats:
        return self._environment.stats()

    def forward(self, port: int, serve: Serve) -> Forward:
        return self._environment.forward(port, serve)

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._environment.put(path, content, mode=mode)

    def get(self, path: str) -> bytes:
        return self._environment.get(path)

    def put_tree(self, archive: bytes, path: str) -> None:
        self._environment.put_tree(archive, path)

    def logs(self) -> dict[str, bytes]:
        """Of its services, where it has any."""
        return self._environment.logs() if isinstance(self._environment, Chronicling) else {}

    def keep_logs(self, logs: OutputLogs | None) -> bool:
        """See `Logging`."""
        return isinstance(self._environment, Logging) and self._environment.keep_logs(logs)

    def memory_kills(self) -> int | None:
        """See `MemoryCounting`."""
        return self._environment.memory_kills() if isinstance(self._environment, MemoryCounting) else None

    def memory_beside(self) -> dict[str, ServiceMemory]:
        """See `ServicesCounting`; nothing where it has none."""
        return self._environment.memory_beside() if isinstance(self._environment, ServicesCounting) else {}

    def processes_refused(self) -> int | None:
        """See `ProcessCounting`."""
        environment = self._environment
        return environment.processes_refused() if isinstance(environment, ProcessCounting) else None

    # --- Its services, where it has any: `Several` is only what has things of its own, too ---

    @property
    def services(self) -> tuple[str, ...]:
        return self._environment.services if isinstance(self._environment, Several) else ()

    def service(self, name: str) -> Shell:
        return self._with_services().service(name)

    def run_in(self, service: str, command: str, *, timeout_s: float) -> CommandResult:
        return self._with_services().run_in(service, command, timeout_s=timeout_s)

    def assure(self) -> None:
        """One container needs nobody."""
        if isinstance(self._environment, Several):
            self._environment.assure()

    def _with_services(self) -> Several:
        if not isinstance(self._environment, Several):
            raise EnvironmentFailed(f"environment {self.id[:12]} has no services: it is one container.")
        return self._environment

    def snapshot(self, tags: Tags) -> Snapshot:
        """No receipt has a line for it: it is there to outlive the attempt."""
        return self._environment.snapshot(tags)

    def reset(self) -> ResetProof:
        proof = self._environment.reset()
        if isinstance(self._environment, Several):
            self._note_others(self._environment)
        return proof

    def _note_others(self, environment: Several) -> None:
        """A reset made its other services anew."""
        try:
            standing = _several(environment, self.id, self._owner)
            ids = {thing.id for thing in standing}
            with self._database.begin() as connection:
                receipts.destroyed(connection, [one for one in self._things if one.id not in ids], Remover.WORKER)
                receipts.created(connection, standing)
            self._things = standing
        except (DatabaseUnavailable, StationError) as error:  # whoever removes them makes up for the lines
            log.warning("environment.not_recorded", environment=self.id, error=str(error))

    def destroy(self) -> None:
        self._environment.destroy()
        try:  # a second time changes nothing: the first end counts
            with self._database.begin() as connection:
                receipts.destroyed(connection, self._things, Remover.WORKER)
        except DatabaseUnavailable as error:
            log.warning("environment.end_not_recorded", environment=self.id, error=str(error))


_OBJECTS = {"local": ObjectKind.FOLDER, "oci": ObjectKind.ENVIRONMENT}
"""What a receipt calls an environment that says to be of this kind; any other is a container."""


class Recording:
    """A provider whose environments are recorded as soon as they exist."""

    def __init__(self, provider: EnvironmentProvider, settings: Settings, database: Database) -> None:
        self._provider = provider
        self._settings = settings
        self._database = database

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        return self._provider.prepare_image(spec, timeout_s=timeout_s)

    def tool_versions(self, spec: EnvironmentSpec) -> Mapping[str, str]:
        """See `tools.Showing`."""
        return versions_of(self._provider, spec)

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> RecordedEnvironment:
        begun = time.time()
        return self._recorded(self._provider.create(spec, tags, timeout_s=timeout_s), spec, tags, begun)

    def create_from(
        self, snapshot: Snapshot, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float
    ) -> RecordedEnvironment:
        begun = time.time()
        made = self._provider.create_from(snapshot, spec, tags, timeout_s=timeout_s)
        return self._recorded(made, spec, tags, begun)

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        self._provider.remove_snapshot(snapshot)

    def _recorded(
        self, environment: Environment, spec: EnvironmentSpec, tags: Tags, begun: float
    ) -> RecordedEnvironment:
        try:
            own, shared = self._made(environment, spec, tags, begun)
            self._note([*own, *shared])
        except BaseException:
            with suppress(StationError):  # the sweeper finds it by its label
                environment.destroy()
            raise
        return RecordedEnvironment(environment, own, owner_of(tags), self._database)

    def sweep(self, *, installation: str, keep: Mapping[str, bool] | None = None) -> list[str]:
        return self._provider.sweep(installation=installation, keep=keep)

    def _note(self, things: list[Thing]) -> None:
        if not things:
            return
        try:
            with self._database.begin() as connection:
                receipts.created(connection, things)
        except DatabaseUnavailable as error:
            log.warning("environment.not_recorded", environment=things[0].id, error=str(error))

    def _made(
        self, environment: Environment, spec: EnvironmentSpec, tags: Tags, begun: float
    ) -> tuple[list[Thing], list[Thing]]:
        """What goes with the environment, and what stays for others (the first network of an installation)."""
        identity, owner, now = environment.id, owner_of(tags), datetime.now(UTC)
        if isinstance(environment, Several):
            return _several(environment, identity, owner), []
        said = environment.describe()["kind"]
        kind = _OBJECTS.get(said, ObjectKind.CONTAINER)
        if not kind.engines:
            return [Thing(kind, identity, owner, now)], []
        from app.environments import listing  # the engine's client is not everywhere

        own = [Thing(kind, identity, owner, now)]
        shared: list[Thing] = []
        try:
            volumes = listing.volumes_of(self._settings, identity)
            own += [Thing(ObjectKind.VOLUME, name, owner, now) for name in volumes]
            if spec.network is Network.OPEN:
                networks = listing.networks_since(self._settings, begun - 1.0)
                shared = [Thing(ObjectKind.NETWORK, name, owner, now) for name in networks]
        except StationError as error:  # its first command will tell whether it is well
            log.warning("environment.not_looked_at", environment=identity, error=str(error))
        return own, shared


def _several(environment: Several, identity: str, owner: Owner) -> list[Thing]:
    """The main container first. Raises: EnvironmentFailed, EngineUnavailable."""
    stands, now = environment.things(), datetime.now(UTC)
    kinds = {
        ObjectKind.CONTAINER: (identity, *(one for one in stands.containers if one != identity)),
        ObjectKind.NETWORK: stands.networks,
        ObjectKind.VOLUME: stands.volumes,
    }
    return [Thing(kind, one, owner, now) for kind, ids in kinds.items() for one in ids]


def owner_of(tags: Tags) -> Owner:
    """Whom the receipt names. What is of nobody yet is on no receipt."""
    assert tags.run_id is not None
    assert tags.task_id is not None
    assert tags.attempt_id is not None
    return Owner(tags.run_id, tags.task_id, tags.attempt_id, tags.instance_id)
