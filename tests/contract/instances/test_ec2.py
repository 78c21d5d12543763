"""What EC2 alone does: types and zones in turn, refusals of several kinds, spot, events; before moto."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity
from app.instances.cloud import Throttled
from app.instances.ec2 import provider as module
from app.instances.ec2.calls import CloudCalls
from app.instances.ec2.provider import SPOT, Ec2Instances
from tests.contract.instances.ec2_fixture import Ec2Fixture
from tests.ec2_machines import client
from tests.moto_server import losing_reply, refusing, told
from tests.waiting import eventually, in_background

pytestmark = pytest.mark.extra


def _subnets(fixture: Ec2Fixture) -> tuple[str, ...]:
    found = fixture.ec2.describe_subnets()["Subnets"]
    return tuple(sorted(subnet["SubnetId"] for subnet in found))[:2]


def _provider(fixture: Ec2Fixture, **changes: Any) -> Ec2Instances:
    """One with other settings, in the fixture's place."""
    fixture.provider = Ec2Instances(fixture.settings.model_copy(update=changes))
    assert isinstance(fixture.provider, Ec2Instances)
    return fixture.provider


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every machine that is asked for, in their order."""
    seen: list[dict[str, Any]] = []
    describe = Ec2Instances._machine

    def noted(*of: Any) -> dict[str, Any]:
        seen.append(describe(*of))
        return seen[-1]

    monkeypatch.setattr(Ec2Instances, "_machine", noted)
    return seen


def test_without_capacity_it_goes_on_to_the_next_type_then_the_next_zone(
    ec2_fixture: Ec2Fixture, asked: list[dict[str, Any]]
) -> None:
    first, second = _subnets(ec2_fixture)
    provider = _provider(ec2_fixture, ec2_subnets=(first, second))
    refuse = refusing("InsufficientInstanceCapacity", 500)

    def full_but_one(request: Any, **more: Any) -> Any:
        last = asked[-1]
        return None if (last["InstanceType"], last["SubnetId"]) == ("c7i.2xlarge", second) else refuse(request, **more)

    (request,) = ec2_fixture.requested()
    with ec2_fixture.sending(full_but_one):
        handles = provider.launch([request])
    ways = [(one["InstanceType"], one["SubnetId"]) for one in asked]
    assert ways == [("c7i.2xlarge", first), ("c7a.2xlarge", first), ("c7i.2xlarge", second)]  # each once: no retries
    (machine,) = ec2_fixture.account.machines()
    assert (machine["InstanceId"], machine["InstanceType"]) == (handles[request.instance_id], "c7i.2xlarge")
    assert machine["SubnetId"] == second


def test_a_used_up_quota_is_a_lack_of_capacity(ec2_fixture: Ec2Fixture) -> None:
    with ec2_fixture.sending(refusing("VcpuLimitExceeded", 400)), pytest.raises(NoCapacity):
        ec2_fixture.provider.launch(ec2_fixture.requested(3))


def test_a_resource_class_may_have_types_of_its_own(ec2_fixture: Ec2Fixture) -> None:
    provider = _provider(ec2_fixture, ec2_types=("large=c7i.8xlarge", "c7i.2xlarge"), ec2_spot=True)
    (request,) = ec2_fixture.requested()
    provider.launch([request.model_copy(update={"resource_class": "large"})])
    (machine,) = ec2_fixture.account.machines()
    assert (machine["InstanceType"], machine["InstanceLifecycle"]) == ("c7i.8xlarge", "spot")
    assert machine["MetadataOptions"]["HttpTokens"] == "required"
    assert machine["MetadataOptions"]["HttpPutResponseHopLimit"] == 1


def test_throttled_it_asks_no_more_and_nothing_is_made(ec2_fixture: Ec2Fixture, asked: list[dict[str, Any]]) -> None:
    with ec2_fixture.sending(refusing("RequestLimitExceeded", 503)), pytest.raises(Throttled):
        ec2_fixture.provider.launch(ec2_fixture.requested(40))
    assert 1 <= len(asked) <= 40  # those that were under way; each asked once
    assert len({one["ClientToken"] for one in asked}) == len(asked)
    assert ec2_fixture.left() == []


def test_a_lost_reply_is_asked_for_again_in_the_same_way_with_the_same_token(
    ec2_fixture: Ec2Fixture, asked: list[dict[str, Any]]
) -> None:
    """On EC2 the token alone makes one of two; moto ignores it, so here the lists are what says that it is there."""
    (request,) = ec2_fixture.requested()
    refuse, provider = refusing("InsufficientInstanceCapacity", 500), ec2_fixture.provider
    assert isinstance(provider, Ec2Instances)

    def first_is_full_second_is_lost(request: Any, **more: Any) -> Any:
        return refuse(request, **more) if asked[-1]["InstanceType"] == "c7i.2xlarge" else losing_reply(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider, "_find", lambda ids: {})  # not listed yet
        with ec2_fixture.sending(first_is_full_second_is_lost), pytest.raises(LaunchUnclear):
            provider.launch([request])
        with ec2_fixture.sending(refusing("IdempotentParameterMismatch", 400)), pytest.raises(LaunchUnclear):
            provider.launch([request])
    assert [one["InstanceType"] for one in asked] == ["c7i.2xlarge", "c7a.2xlarge", "c7a.2xlarge"]
    assert asked[1]["ClientToken"] == asked[2]["ClientToken"] != asked[0]["ClientToken"]
    handles = provider.launch([request])
    assert len(asked) == 3
    assert ec2_fixture.made(request.instance_id) == 1
    assert provider.alive() == handles


def test_of_two_machines_of_one_instance_the_younger_is_ended(ec2_fixture: Ec2Fixture) -> None:
    (request,) = ec2_fixture.requested()
    provider = ec2_fixture.provider
    assert isinstance(provider, Ec2Instances)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider, "_find", lambda ids: {})
        first = provider.launch([request])
        eventually(lambda: provider.launch([request]) != first)
    assert ec2_fixture.made(request.instance_id) == 2
    assert set(provider.alive()) == {request.instance_id}
    assert ec2_fixture.made(request.instance_id) == 1


def test_a_machine_that_somebody_stopped_is_ended(ec2_fixture: Ec2Fixture) -> None:
    (request,) = ec2_fixture.requested()
    (handle,) = ec2_fixture.provider.launch([request]).values()
    ec2_fixture.ec2.stop_instances(InstanceIds=[handle])
    eventually(lambda: handle not in ec2_fixture.provider.alive().values() and not ec2_fixture.left())


def test_lapsed_credentials_are_read_again(
    ec2_fixture: Ec2Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = x\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    refuse, provider = refusing("ExpiredToken", 403), _provider(ec2_fixture)
    original = CloudCalls.client

    def checked(self: CloudCalls, service: str, tries: int = 3) -> Any:
        found = original(self, service, tries)
        found.meta.events.register("before-send.ec2", only_new, unique_id="only new")
        return found

    def only_new(request: Any, **more: Any) -> Any:
        return refuse(request, **more) if b"Credential=old/" in request.headers["Authorization"] else None

    monkeypatch.setattr(CloudCalls, "client", checked)
    requests = ec2_fixture.requested(2)
    with pytest.raises(InstanceFailed, match="renew the credentials"):
        provider.launch(requests)
    with pytest.raises(InstanceFailed, match="renew the credentials"):
        provider.alive()
    file.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = x\n")
    assert provider.alive() == {}
    assert set(provider.launch(requests)) == {request.instance_id for request in requests}


def test_lists_of_several_pages_are_whole_and_of_this_installation(
    ec2_fixture: Ec2Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAGE", 5)
    other = _provider(ec2_fixture, installation="another")
    theirs = other.launch(ec2_fixture.requested(1))
    provider = _provider(ec2_fixture)
    handles = provider.launch(ec2_fixture.requested(12))
    assert len(handles) == 12
    fresh = _provider(ec2_fixture)  # which remembers none of them
    assert fresh.alive() == handles
    for instance_id, handle in theirs.items():
        other.terminate(instance_id, handle, grace_s=0)


def test_a_machine_that_starts_slowly_is_there(ec2_fixture: Ec2Fixture) -> None:
    slow = {"progression": "manual", "times": 3}
    told(ec2_fixture.endpoint, "state-manager/set-transition", model_name="ec2::instance", transition=slow)
    (request,) = ec2_fixture.requested()
    handles = ec2_fixture.provider.launch([request])
    provider = _provider(ec2_fixture)
    assert provider.alive() == handles
    assert provider.launch([request]) == handles
    slow["progression"] = "immediate"
    told(ec2_fixture.endpoint, "state-manager/set-transition", model_name="ec2::instance", transition=slow)


class _Heard:
    def __init__(self) -> None:
        self.exits: list[tuple[UUID, str]] = []
        self.warnings: list[tuple[UUID, str]] = []

    def exit(self, instance_id: UUID, code: int | None, why: str) -> None:
        assert code is None
        self.exits.append((instance_id, why))

    def warning(self, instance_id: UUID, why: str) -> None:
        self.warnings.append((instance_id, why))

    def watch(self, provider: Ec2Instances) -> Any:
        provider.warn(self.warning)
        return in_background(lambda stop: provider.watch(self.exit, stop))


def test_a_spot_machine_that_is_taken_back_is_told_before_and_after(ec2_fixture: Ec2Fixture) -> None:
    provider, heard = _provider(ec2_fixture, ec2_spot=True), _Heard()
    (request,) = ec2_fixture.requested()
    (handle,) = provider.launch([request]).values()
    with heard.watch(Ec2Instances(ec2_fixture.settings)):  # another control worker, which did not launch it
        ec2_fixture.account.tell(SPOT, handle)
        eventually(lambda: heard.warnings)
        assert heard.warnings == [(request.instance_id, "EC2 takes its spot machine back within two minutes")]
        assert heard.exits == []
        ec2_fixture.take_away(handle)
        eventually(lambda: heard.exits)
        assert heard.exits[0] == (request.instance_id, "EC2 took its spot machine back")


def test_events_of_others_and_of_no_form_change_nothing(ec2_fixture: Ec2Fixture) -> None:
    other = ec2_fixture.ec2.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1)["Instances"][0]
    heard, provider = _Heard(), _provider(ec2_fixture)
    (request,) = ec2_fixture.requested()
    (handle,) = provider.launch([request]).values()
    sqs = client("sqs", ec2_fixture.endpoint)
    url = str(provider._settings.ec2_events)
    for body in ("x", "{}", "null", '{"source": "aws.ec2", "detail-type": 3}', "[1]"):
        sqs.send_message(QueueUrl=url, MessageBody=body)
    with heard.watch(provider):
        ec2_fixture.account.tell(SPOT, other["InstanceId"])
        ec2_fixture.take_away(other["InstanceId"])
        ec2_fixture.take_away(handle)
        eventually(lambda: heard.exits)
        eventually(lambda: _waiting(sqs, url) == 0, "the queue is empty")
    assert {instance_id for instance_id, _ in heard.exits} == {request.instance_id}
    assert heard.warnings == []


def _waiting(sqs: Any, url: str) -> int:
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    return int(found["ApproximateNumberOfMessages"]) + int(found["ApproximateNumberOfMessagesNotVisible"])


def test_after_the_queue_was_away_what_ended_meanwhile_is_told(ec2_fixture: Ec2Fixture) -> None:
    provider, heard = _provider(ec2_fixture), _Heard()
    requests = ec2_fixture.requested(2)
    first, second = provider.launch(requests).values()
    sqs = client("sqs", ec2_fixture.endpoint)
    url = str(ec2_fixture.settings.ec2_events)
    sqs.delete_queue(QueueUrl=url)
    with heard.watch(provider):
        ec2_fixture.ec2.terminate_instances(InstanceIds=[first])
        eventually(lambda: heard.exits)
        assert {instance_id for instance_id, _ in heard.exits} == {requests[0].instance_id}
        sqs.create_queue(QueueName="megaflow")
        ec2_fixture.take_away(second)
        eventually(lambda: requests[1].instance_id in {instance_id for instance_id, _ in heard.exits})
