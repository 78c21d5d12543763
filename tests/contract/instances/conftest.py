"""The providers under the suite; ground.py says how to add one."""

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
from tests.contract.instances.alibaba_ground import alibaba_ground
from tests.contract.instances.docker_ground import docker_ground, waiting_image
from tests.contract.instances.ec2_ground import ec2_ground, moto_endpoint
from tests.contract.instances.ground import SECRET, ProviderGround
from tests.contract.instances.kubernetes_ground import kubernetes_ground
from tests.contract.instances.process_ground import process_ground
from tests.contract.instances.slurm_ground import cluster, slurm_ground
from tests.services import MakeSettings
from tests.waiting import eventually, in_background

__all__ = [
    "alibaba_ground",
    "cluster",
    "docker_ground",
    "ec2_ground",
    "kubernetes_ground",
    "moto_endpoint",
    "process_ground",
    "slurm_ground",
    "waiting_image",
]

GROUNDS = [
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


@pytest.fixture(params=GROUNDS)
def ground(request: pytest.FixtureRequest) -> Iterator[ProviderGround]:
    """A provider and its engine, which has nothing left at the end of a test."""
    found: ProviderGround = request.getfixturevalue(f"{request.param}_ground")
    for mark in request.node.iter_markers("needs"):
        if mark.args[0] not in found.abilities:
            pytest.skip(f"the ground {request.param} says: not {mark.args[0]}")
    yield found
    for instance_id, handle in found.provider.alive().items():
        found.provider.terminate(instance_id, handle, grace_s=0)
    with in_background(ControlPlane(found, RetryPolicy(0.0, 1.0)).watch):  # it also removes files of what has ended
        eventually(lambda: not found.provider.alive() and not found.left(), "nothing left", within_s=found.slow_s)


@dataclass(frozen=True)
class ControlPlane:
    """What the control worker does with a provider: it hears of ends, and compares lists."""

    ground: ProviderGround
    retry: RetryPolicy

    def watch(self, stop: threading.Event) -> None:
        if isinstance(self.ground.provider, WatchedProvider):
            self.ground.provider.watch(
                lambda i, code, why: instances.exited(self.ground.database, i, code, why, self.retry), stop
            )

    def sweep(self) -> None:
        provider = self.ground.provider

        def terminate(_: str, instance_id: Any, handle: str) -> None:
            with suppress(InstanceFailed):
                provider.terminate(instance_id, handle, grace_s=0)

        def started() -> dict[str, dict[UUID, float | None]]:
            return {provider.name: provider.started()} if isinstance(provider, QueueingProvider) else {}

        hands = Hands(lambda: {provider.name: provider.alive()}, terminate, lambda: None, lambda _: None, started)
        Reconciler(self.ground.database, self.ground.settings, hands).sweep()

    def row(self, request: InstanceRequest) -> tuple[str, int | None]:
        """State and exit code of the instance, as the ledger has them."""
        with self.ground.database.begin() as connection:
            query = text("SELECT state, exit_code FROM instances WHERE id = :id")
            found = connection.execute(query, {"id": request.instance_id}).one()
            return found.state, found.exit_code

    def ended(self, request: InstanceRequest) -> tuple[str, int | None]:
        """As soon as the ledger knows the end."""
        within_s = self.ground.slow_s
        eventually(lambda: self.row(request)[0] in ("failed", "terminated"), "its end on record", within_s=within_s)
        return self.row(request)


@pytest.fixture
def control(ground: ProviderGround) -> ControlPlane:
    return ControlPlane(ground, RetryPolicy(0.0, 1.0))


@pytest.fixture
def watched(control: ControlPlane) -> Iterator[ControlPlane]:
    """Ends are heard for the whole test."""
    with in_background(control.watch):
        yield control
