"""The providers under the suite; fixture.py says how to add one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from app.errors import InstanceFailed
from app.instances.base import QueueingProvider, WatchedProvider
from app.ledger import instances
from app.models.endings import RetryPolicy
from app.models.instance import InstanceRequest
from app.scheduling.reconciler import Hands, Reconciler
from app.settings import Settings
from tests.contract.instances.alibaba_fixture import alibaba_fixture
from tests.contract.instances.docker_fixture import docker_fixture, waiting_image
from tests.contract.instances.ec2_fixture import ec2_fixture, moto_endpoint
from tests.contract.instances.fixture import SECRET, ProviderFixture
from tests.contract.instances.kubernetes_fixture import kubernetes_fixture
from tests.contract.instances.process_fixture import process_fixture
from tests.contract.instances.slurm_fixture import cluster, slurm_fixture
from tests.services import MakeSettings
from tests.waiting import eventually, in_background

__all__ = [
    "alibaba_fixture",
    "cluster",
    "docker_fixture",
    "ec2_fixture",
    "kubernetes_fixture",
    "moto_endpoint",
    "process_fixture",
    "slurm_fixture",
    "waiting_image",
]

FIXTURES = [
    pytest.param("process"),
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("slurm", marks=pytest.mark.extra),
    pytest.param("kubernetes", marks=[pytest.mark.docker, pytest.mark.extra]),
    pytest.param("ec2", marks=pytest.mark.extra),
    pytest.param("alibaba", marks=pytest.mark.extra),
]


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    logins = f'{{"registry.example:5000": "somebody:{SECRET}"}}'
    return make_settings(registry_auth=logins, boot_timeout_s=0.2, retry_base_s=0.0, drain_s=0.5)


@pytest.fixture(params=FIXTURES)
def fixture(request: pytest.FixtureRequest) -> Iterator[ProviderFixture]:
    """A provider and its engine, which has nothing left at the end of a test."""
    found: ProviderFixture = request.getfixturevalue(f"{request.param}_fixture")
    for mark in request.node.iter_markers("needs"):
        if mark.args[0] not in found.abilities:
            pytest.skip(f"the fixture {request.param} says: not {mark.args[0]}")
    yield found
    for instance_id, handle in found.provider.alive().items():
        found.provider.terminate(instance_id, handle, grace_s=0)
    with in_background(ControlPlane(found, RetryPolicy(0.0, 1.0)).watch):  # it also removes files of what has ended
        eventually(lambda: not found.provider.alive() and not found.left(), "nothing left", within_s=found.slow_s)


@dataclass(frozen=True)
class ControlPlane:
    """What the control worker does with a provider: it hears of ends, and compares lists."""

    fixture: ProviderFixture
    retry: RetryPolicy

    def watch(self, stop: threading.Event) -> None:
        if isinstance(self.fixture.provider, WatchedProvider):
            self.fixture.provider.watch(
                lambda i, code, why: instances.exited(self.fixture.database, i, code, why, self.retry), stop
            )

    def sweep(self) -> None:
        provider = self.fixture.provider

        def terminate(_: str, instance_id: Any, handle: str) -> None:
            with suppress(InstanceFailed):
                provider.terminate(instance_id, handle, grace_s=0)

        def started() -> dict[str, dict[UUID, float | None]]:
            return {provider.name: provider.started()} if isinstance(provider, QueueingProvider) else {}

        hands = Hands(lambda: {provider.name: provider.alive()}, terminate, lambda: None, lambda _: None, started)
        Reconciler(self.fixture.database, self.fixture.settings, hands).sweep()

    def row(self, request: InstanceRequest) -> tuple[str, int | None]:
        """State and exit code of the instance, as the ledger has them."""
        with self.fixture.database.begin() as connection:
            query = text("SELECT state, exit_code FROM instances WHERE id = :id")
            found = connection.execute(query, {"id": request.instance_id}).one()
            return found.state, found.exit_code

    def ended(self, request: InstanceRequest) -> tuple[str, int | None]:
        """As soon as the ledger knows the end."""
        within_s = self.fixture.slow_s
        eventually(lambda: self.row(request)[0] in ("failed", "terminated"), "its end on record", within_s=within_s)
        return self.row(request)


@pytest.fixture
def control(fixture: ProviderFixture) -> ControlPlane:
    return ControlPlane(fixture, RetryPolicy(0.0, 1.0))


@pytest.fixture
def watched(control: ControlPlane) -> Iterator[ControlPlane]:
    """Ends are heard for the whole test."""
    with in_background(control.watch):
        yield control
