"""Defines what the contract suite of instance providers needs from the engine behind a provider.

To put a provider under the suite, write `NAME_fixture.py`: a subclass of `ProviderFixture`, and a pytest fixture
`NAME_fixture` that starts the engine, yields the subclass's object, and ends what it started. Add it to `FIXTURES` in
conftest.py. The suite ends every instance and then checks `left()`. Leave out of `abilities` what the engine cannot do:
those tests are skipped, and docs/howto names them. Where an engine of the tests runs nothing (a fake of a cloud), `end`
sets the state that the real one would report, and `await_lifetime` checks the requested lifetime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from uuid import UUID

from app.instances.base import Provider
from app.ledger import instances
from app.ledger.database import Database
from app.ledger.instances import InstanceDemand
from app.models.instance import InstanceMode, InstanceRequest
from app.settings import Settings
from tests.waiting import eventually

SECRET = "hunter2-of-the-suite"
"""A password in the settings of every fixture (`registry_auth`): an instance gets it, and no other reader sees it."""

WORKER = """#!/bin/sh
# Stands where a worker would: it stays until told to stop, or until a file says with which code to leave.
for file in /opt/megaflow/environment /run/megaflow/settings/environment; do [ ! -f $file ] || . $file; done
id=$(echo "$*" | grep -o '"instance_id":"[^"]*"' | cut -d '"' -f 4)
trap 'exit 75' TERM
mkdir -p "$MEGAFLOW_HOME/logs/instances"
: > "$MEGAFLOW_HOME/logs/instances/$id.up"
until [ -e "$MEGAFLOW_HOME/logs/instances/$id.end" ]; do sleep 0.05 & wait $!; done
exit "$(cat "$MEGAFLOW_HOME/logs/instances/$id.end")"
"""


class ProviderFixture(ABC):
    """A provider, and hands on the engine behind it that do not go through the provider.

    `abilities`: "codes": ends come with the exit code. "grace": an instance can be told to stop before it is ended.
    "capacity": the engine can be full. "lost_reply": the answer to a launch can be lost here.
    """

    abilities: frozenset[str] = frozenset()
    slow_s: float = 20.0
    """The longest that this engine takes for anything that the suite waits for."""

    def __init__(self, settings: Settings, database: Database, provider: Provider) -> None:
        self.settings = settings
        self.database = database
        self.provider = provider

    def requested(self, count: int = 1, lifetime_s: float | None = None) -> list[InstanceRequest]:
        """Rows in the ledger, as the dispatcher writes them, and what the provider is to be asked for."""
        mode = InstanceMode.PERSISTENT
        with self.database.begin() as connection:
            demand = InstanceDemand(self.provider.name, mode, "standard", 1, count, lifetime_s)
            ids = instances.request(connection, demand)
        return [InstanceRequest(instance_id=i, mode=mode, lifetime_s=lifetime_s) for i in ids]

    @abstractmethod
    def unreachable(self) -> Provider:
        """The same provider before an engine that does not answer at all."""

    @abstractmethod
    def made(self, instance_id: UUID) -> int:
        """How many the engine has of it: waiting or running, not ended."""

    @abstractmethod
    def shown(self, handle: str) -> str:
        """Everything that other users of the engine can see of an instance."""

    @abstractmethod
    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        """Its worker leaves with this exit code."""

    @abstractmethod
    def take_away(self, handle: str) -> None:
        """It is killed, or its machine is gone; nothing is told to the provider but by the engine."""

    @abstractmethod
    def left(self) -> list[str]:
        """What there still is of this installation's instances: machines, jobs, files with secrets."""

    def await_worker(self, instance_id: UUID) -> None:
        """Its worker runs, and hears when it is told to stop: a `WORKER`, or what does as it does ("grace")."""
        sign = self.settings.home / "logs" / "instances" / f"{instance_id}.up"
        eventually(sign.exists, "its worker", within_s=self.slow_s)

    def await_lifetime(self, request: InstanceRequest) -> None:
        """Its lifetime passes, and the engine ends it while no part of ours looks."""
        eventually(lambda: not self.made(request.instance_id), "the end of its lifetime", within_s=self.slow_s)

    def losing_replies(self) -> AbstractContextManager[None]:
        """For the block, launches are carried out, and the answers do not come back ("lost_reply")."""
        raise NotImplementedError

    def full(self) -> AbstractContextManager[None]:
        """For the block, the engine has no room for another instance ("capacity")."""
        raise NotImplementedError


def leave(settings: Settings, instance_id: UUID, code: int) -> None:
    """Tell a `WORKER` to leave with this code."""
    folder: Path = settings.home / "logs" / "instances"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{instance_id}.new").write_text(str(code))
    (folder / f"{instance_id}.new").rename(folder / f"{instance_id}.end")
