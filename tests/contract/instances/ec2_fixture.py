"""The provider `ec2` before moto, which runs no machines, sends no events and ignores client tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest

from app.instances.base import Provider
from app.instances.cloud import INSTALLATION_TAG, INSTANCE_TAG
from app.instances.ec2.calls import CloudCalls
from app.instances.ec2.provider import SPOT, STATES, Ec2Instances
from app.ledger.database import Database
from app.models.instance import InstanceRequest
from app.settings import Settings
from tests.contract.instances.fixture import ProviderFixture
from tests.ec2_machines import REGION, Account, client
from tests.moto_server import Send, losing_reply, refusing, serving_moto, some_credentials, told
from tests.services import free_port

_AMI = "ami-12c6146b"


class Ec2Fixture(ProviderFixture):
    abilities = frozenset({"capacity", "lost_reply"})

    def __init__(self, settings: Settings, database: Database, endpoint: str) -> None:
        self.endpoint = endpoint
        super().__init__(settings, database, Ec2Instances(settings))
        self.account = Account(endpoint)
        self.ec2 = self.account.ec2

    def unreachable(self) -> Provider:
        found = Ec2Instances(self.settings)
        found._calls = CloudCalls(f"http://127.0.0.1:{free_port()}")
        return found

    def made(self, instance_id: UUID) -> int:
        return len(self.account.standing(**{INSTANCE_TAG: str(instance_id)}))

    def shown(self, handle: str) -> str:
        (machine,) = [m for m in self.account.machines() if m["InstanceId"] == handle]
        return json.dumps(machine, default=str) + self.account.user_data(handle)

    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        """Its script's last line powers it off, whatever the code."""
        self.take_away(handle)

    def take_away(self, handle: str) -> None:
        self.ec2.terminate_instances(InstanceIds=[handle])
        for state in ("shutting-down", "terminated"):
            self.account.tell(STATES, handle, state=state)

    def left(self) -> list[str]:
        return [m["InstanceId"] for m in self.account.standing(**{INSTALLATION_TAG: self.settings.installation})]

    def await_lifetime(self, request: InstanceRequest) -> None:
        (handle,) = self.left()
        script = self.account.user_data(handle).splitlines()
        assert re.fullmatch(r"shutdown -P \+1", script[2]), script  # of one second, a minute: less there is not
        found = self.ec2.describe_instance_attribute(InstanceId=handle, Attribute="instanceInitiatedShutdownBehavior")
        assert found["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
        self.take_away(handle)

    @contextmanager
    def sending(self, send: Send) -> Iterator[None]:
        """For the block, this stands between the provider and EC2 where machines are started."""
        provider = self.provider
        assert isinstance(provider, Ec2Instances)
        hooks = provider._calls.client("ec2", tries=1).meta.events
        hooks.register("before-send.ec2.RunInstances", send)
        yield
        hooks.unregister("before-send.ec2.RunInstances", send)

    @contextmanager
    def losing_replies(self) -> Iterator[None]:
        provider = self.provider
        assert isinstance(provider, Ec2Instances)
        found, provider._find = provider._find, lambda ids: {}  # type: ignore[method-assign]  # not listed yet, either
        with self.sending(losing_reply):
            yield
        provider._find = found  # type: ignore[method-assign]

    @contextmanager
    def full(self) -> Iterator[None]:
        with self.sending(refusing("InsufficientInstanceCapacity", 500)):
            yield


def made_queue(endpoint: str) -> str:
    """A queue that gets what docs/howto/clouds.md sends to it; its URL."""
    sqs = client("sqs", endpoint)
    events = client("events", endpoint)
    url: str = sqs.create_queue(QueueName="megaflow")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    pattern = {"source": ["aws.ec2"], "detail-type": [STATES, SPOT]}
    events.put_rule(Name="megaflow", EventPattern=json.dumps(pattern))
    events.put_targets(Rule="megaflow", Targets=[{"Id": "megaflow", "Arn": arn}])
    return url


def made_template(endpoint: str, name: str = "megaflow") -> None:
    ec2 = client("ec2", endpoint)
    data = {"ImageId": _AMI, "InstanceType": "c7i.large"}
    ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)


@pytest.fixture(scope="session")
def moto_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_moto(tmp_path_factory.mktemp("moto") / "server.log") as endpoint:
        yield endpoint


@pytest.fixture
def ec2_fixture(
    settings: Settings, database: Database, moto_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Ec2Fixture:
    some_credentials(monkeypatch)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    told(moto_endpoint, "reset")
    made_template(moto_endpoint)
    values = {
        "ec2_template": "megaflow",
        "ec2_types": ("c7i.2xlarge", "c7a.2xlarge"),
        "ec2_events": made_queue(moto_endpoint),
        "web_url": "https://megaflow.example.org",
    }
    return Ec2Fixture(settings.model_copy(update=values), database, moto_endpoint)
