"""The provider `docker` before the real engine; in its containers a shell script stands where the worker would."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest

from app.instances.docker import DockerInstances
from app.ledger.database import Database
from app.settings import Settings
from app.stack.engine import connected, engine_url
from tests.contract.environment_fixtures import built_image
from tests.contract.instances.fixture import WORKER, ProviderFixture, leave
from tests.integration.engine_proxy import engine_proxy
from tests.services import free_port


class DockerFixture(ProviderFixture):
    abilities = frozenset({"codes", "grace", "lost_reply"})

    def unreachable(self) -> DockerInstances:
        return DockerInstances(self.settings.model_copy(update={"docker_url": f"tcp://127.0.0.1:{free_port()}"}))

    def made(self, instance_id: UUID) -> int:
        return len(self._containers(f"megaflow.instance={instance_id}", ["created", "running", "paused"]))

    def shown(self, handle: str) -> str:
        with connected(self.settings) as client:
            return json.dumps(client.api.inspect_container(handle))

    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        leave(self.settings, instance_id, code)

    def take_away(self, handle: str) -> None:
        with connected(self.settings) as client:
            client.api.kill(handle, signal=signal.SIGKILL)

    def left(self) -> list[str]:
        return [one.name for one in self._containers(f"megaflow={self.settings.installation}", None)]

    @contextmanager
    def losing_replies(self) -> Iterator[None]:
        provider = self.provider
        assert isinstance(provider, DockerInstances)
        with engine_proxy(engine_url(self.settings)) as proxy:
            proxy.lost.add("POST /containers/create")
            provider._settings = self.settings.model_copy(update={"docker_url": proxy.url})
            yield
            provider._settings = self.settings

    def _containers(self, label: str, states: list[str] | None) -> list[Any]:
        with connected(self.settings) as client:
            filters = {"label": label} | ({"status": states} if states else {})
            return list(client.containers.list(all=True, filters=filters, ignore_removed=True))


@pytest.fixture(scope="session")
def waiting_image(base_image_tag: str) -> Iterator[str]:
    recipe = f"FROM {base_image_tag}\nCOPY worker.sh /usr/local/bin/python\n"
    with built_image(recipe, {"worker.sh": WORKER.encode()}) as tag:
        yield tag


@pytest.fixture
def docker_fixture(settings: Settings, database: Database, waiting_image: str) -> DockerFixture:
    settings = settings.model_copy(update={"worker_image": waiting_image})
    return DockerFixture(settings, database, DockerInstances(settings))
