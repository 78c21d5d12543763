"""The provider `alibaba` before a server written by hand: it has never met the real cloud."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from app.instances import cloud
from app.instances.base import Provider
from app.instances.cloud import INSTANCE_TAG
from app.ledger.database import Database
from app.models.instance import InstanceRequest
from app.settings import Settings
from tests.contract.instances.alibaba_server import Ecs, serving_ecs
from tests.contract.instances.fixture import ProviderFixture
from tests.services import free_port


class AlibabaFixture(ProviderFixture):
    abilities = frozenset({"capacity", "lost_reply"})

    def __init__(self, settings: Settings, database: Database, ecs: Ecs) -> None:
        from app.instances.alibaba import AlibabaInstances  # an extra's packages, which take seconds to import

        self.ecs = ecs
        super().__init__(settings, database, AlibabaInstances(settings))

    def unreachable(self) -> Provider:
        endpoint = f"127.0.0.1:{free_port()}"
        return type(self.provider)(self.settings.model_copy(update={"alibaba_endpoint": endpoint}))  # type: ignore[call-arg]

    def made(self, instance_id: UUID) -> int:
        with self.ecs.lock:
            return sum(one.tags[INSTANCE_TAG] == str(instance_id) for one in self.ecs.machines.values())

    def shown(self, handle: str) -> str:
        asked = self.ecs.machines[handle].asked
        return json.dumps(asked) + base64.b64decode(asked["UserData"]).decode()

    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        """Its script's last line powers it off, which releases nothing."""
        self.ecs.machines[handle].status = "Stopped"

    def take_away(self, handle: str) -> None:
        with self.ecs.lock:
            self.ecs.machines.pop(handle, None)

    def left(self) -> list[str]:
        return list(self.ecs.machines)

    def await_lifetime(self, request: InstanceRequest) -> None:
        (handle,) = self.left()
        asked = self.ecs.machines[handle].asked
        end = datetime.strptime(asked["AutoReleaseTime"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        assert timedelta(minutes=30) < end - datetime.now(UTC) < timedelta(minutes=32)  # no sooner
        assert "shutdown -P +1" in base64.b64decode(asked["UserData"]).decode().splitlines()
        self.take_away(handle)

    @contextmanager
    def losing_replies(self) -> Iterator[None]:
        provider = self.provider
        found, provider._find = provider._find, lambda ids: {}  # type: ignore[attr-defined]  # not listed yet, either
        self.ecs.lose = True
        yield
        self.ecs.lose = False
        provider._find = found  # type: ignore[attr-defined]

    @contextmanager
    def full(self) -> Iterator[None]:
        self.ecs.sold_out |= set(self.settings.alibaba_types)
        yield
        self.ecs.sold_out.clear()


@pytest.fixture
def alibaba_fixture(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AlibabaFixture]:
    from alibabacloud_credentials.utils import auth_util  # it has read the environment when it was imported

    monkeypatch.setattr(cloud, "_YOUNG_S", 2.0)  # this server lists a machine at once
    monkeypatch.setattr("app.instances.alibaba._POLL_S", 0.3)
    monkeypatch.setattr(auth_util, "environment_access_key_id", "somebody")
    monkeypatch.setattr(auth_util, "environment_access_key_secret", "nothing")
    with serving_ecs() as (ecs, endpoint):
        values = {
            "alibaba_endpoint": endpoint,
            "alibaba_template": "megaflow",
            "alibaba_types": ("ecs.c8a.2xlarge", "ecs.c7.2xlarge"),
            "web_url": "https://megaflow.example.org",
        }
        yield AlibabaFixture(settings.model_copy(update=values), database, ecs)
