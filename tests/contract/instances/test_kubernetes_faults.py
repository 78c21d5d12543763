"""Faults of a Kubernetes cluster, by name: no instance is made twice, none is forgotten, no end is missed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.batch_v1 import Job

from app.errors import InstanceFailed, LaunchUnclear
from app.instances import kubernetes
from app.instances.kubernetes import KubernetesInstances
from app.instances.kubernetes_job import QUEUE, job_name
from app.kubernetes import configuration
from app.ledger import instances
from app.models.endings import RetryPolicy
from app.models.instance import InstanceRequest
from tests.contract.instances.conftest import ControlPlane
from tests.contract.instances.kubernetes_fixture import KubernetesFixture
from tests.kubernetes import Fault
from tests.waiting import eventually, in_background

pytestmark = [pytest.mark.docker, pytest.mark.extra]


@pytest.fixture
def control(kubernetes_fixture: KubernetesFixture) -> Iterator[ControlPlane]:
    fixture = kubernetes_fixture
    if not hasattr(fixture, "cluster"):
        pytest.skip("a real cluster, whose API server these tests may not break")
    yield ControlPlane(fixture, RetryPolicy(0.0, 1.0))
    for instance_id, handle in fixture.provider.alive().items():
        fixture.provider.terminate(instance_id, handle, grace_s=0)
    eventually(lambda: not fixture.provider.alive() and not fixture.left(), "nothing left", within_s=20)


@pytest.fixture
def watching(kubernetes_fixture: KubernetesFixture, control: ControlPlane) -> Iterator[None]:
    """The watch is open."""
    with in_background(control.watch):
        eventually(lambda: "WATCH pods" in kubernetes_fixture.cluster.requests)
        yield


def _running(fixture: KubernetesFixture, count: int) -> list[InstanceRequest]:
    requests = fixture.requested(count)
    instances.launched(fixture.database, fixture.provider.launch(requests))
    eventually(lambda: [fixture.made(r.instance_id) for r in requests] == [1] * count, within_s=20)
    return requests


def _pod_of(fixture: KubernetesFixture, request: InstanceRequest) -> dict[str, dict[str, str]]:
    (pod,) = fixture.pods(request.instance_id)
    return pod


def _why(fixture: KubernetesFixture, request: InstanceRequest) -> str:
    """The reason of its end, as the ledger has it."""
    with fixture.database.begin() as connection:
        query = "SELECT data ->> 'why' FROM events WHERE instance_id = %s AND kind LIKE 'instance.%%ed'"
        return str(connection.exec_driver_sql(query, (request.instance_id,)).scalars().all())


@pytest.mark.usefixtures("watching")
def test_a_watch_that_is_cut_goes_on_where_it_was(kubernetes_fixture: KubernetesFixture, control: ControlPlane) -> None:
    fixture = kubernetes_fixture
    one, two = _running(fixture, 2)
    lists = fixture.cluster.requests.count("GET pods")
    fixture.cluster.cut_watches()
    fixture.end(one.instance_id, "", 7)
    assert control.ended(one) == ("failed", 7)
    fixture.cluster.cut_watches()
    fixture.end(two.instance_id, "", 0)
    assert control.ended(two) == ("terminated", 0)
    assert fixture.cluster.requests.count("GET pods") == lists, "nothing was listed again"


@pytest.mark.usefixtures("watching")
def test_a_version_that_is_forgotten_is_answered_by_a_list(
    kubernetes_fixture: KubernetesFixture, control: ControlPlane
) -> None:
    fixture = kubernetes_fixture
    fixture.cluster.bookmark_s = 3600  # the watch does not learn that versions go on
    (one,) = _running(fixture, 1)
    lists = fixture.cluster.requests.count("GET pods")
    fixture.cluster.forget()
    fixture.cluster.cut_watches()
    fixture.end(one.instance_id, "", 7)
    assert control.ended(one) == ("failed", 7)
    assert fixture.cluster.requests.count("GET pods") > lists


def test_a_watch_that_says_nothing_is_opened_again(
    kubernetes_fixture: KubernetesFixture, control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost connection tells nobody; the client itself would wait for ever."""
    fixture = kubernetes_fixture
    monkeypatch.setattr(kubernetes, "_SILENT_S", 0.5)
    fixture.cluster.bookmark_s = 3600
    with in_background(control.watch):
        eventually(lambda: fixture.cluster.requests.count("WATCH pods") >= 3)


@pytest.mark.usefixtures("watching")
def test_an_api_server_that_restarts(kubernetes_fixture: KubernetesFixture, control: ControlPlane) -> None:
    fixture = kubernetes_fixture
    one, two = _running(fixture, 2)
    fixture.cluster.stop()
    fixture.end(one.instance_id, "", 7)
    with pytest.raises(InstanceFailed):
        fixture.provider.alive()
    threading.Event().wait(1.5)
    fixture.cluster.forget()
    fixture.cluster.start()
    assert control.ended(one) == ("failed", 7)
    assert set(fixture.provider.launch([two])) == {two.instance_id}
    assert len(fixture.pods()) == 1
    # It does not register within the boot timeout of these settings.
    eventually(lambda: control.sweep() or control.row(two)[0] == "failed")
    eventually(lambda: not fixture.pods(), within_s=20)


@pytest.mark.usefixtures("watching")
def test_a_node_that_is_taken_away(kubernetes_fixture: KubernetesFixture, control: ControlPlane) -> None:
    fixture = kubernetes_fixture
    requests = _running(fixture, 2)
    nodes = {_pod_of(fixture, one)["spec"]["nodeName"]: one for one in requests}
    fixture.cluster.take_node("node-1")
    lost, other = nodes["node-1"], nodes["node-2"]
    assert control.ended(lost)[0] == "failed"
    assert "NodeLost" in _why(fixture, lost)
    assert set(fixture.provider.alive()) == {other.instance_id}
    assert len(fixture.pods()) == 1, "the Job makes no other pod"


@pytest.mark.usefixtures("watching")
def test_a_pod_that_is_evicted(kubernetes_fixture: KubernetesFixture, control: ControlPlane) -> None:
    fixture = kubernetes_fixture
    (one,) = _running(fixture, 1)
    fixture.cluster.evict(_pod_of(fixture, one)["metadata"]["name"])
    assert control.ended(one)[0] == "failed"
    assert "Evicted" in _why(fixture, one)
    eventually(lambda: fixture.provider.alive() == {}, within_s=20)


@pytest.mark.usefixtures("watching")
def test_a_lifetime_that_is_over_is_named(kubernetes_fixture: KubernetesFixture, control: ControlPlane) -> None:
    fixture = kubernetes_fixture
    (one,) = fixture.requested(lifetime_s=2.0)
    fixture.provider.launch([one])
    assert control.ended(one)[1] in (75, None)
    eventually(lambda: fixture.provider.alive() == {}, within_s=20)
    assert "DeadlineExceeded" in _why(fixture, one)


@pytest.mark.parametrize("step", ["POST secrets", "PATCH jobs"])
@pytest.mark.parametrize("done", [True, False])
def test_an_answer_that_is_lost_midway_leaves_one_instance_that_works(
    kubernetes_fixture: KubernetesFixture, control: ControlPlane, step: str, done: bool
) -> None:
    fixture = kubernetes_fixture
    (one,) = fixture.requested(1)
    method, plural = step.split()
    fixture.cluster.faults.append(Fault(method, plural, after=done))
    with pytest.raises(LaunchUnclear):
        fixture.provider.launch([one])
    assert set(fixture.provider.alive()) == {one.instance_id}
    instances.launched(fixture.database, fixture.provider.launch([one]))
    eventually(lambda: fixture.made(one.instance_id) == 1, within_s=20)
    assert len(fixture.cluster.objects("jobs")) == len(fixture.cluster.objects("secrets")) == 1
    fixture.end(one.instance_id, "", 0)
    with in_background(control.watch):
        assert control.ended(one) == ("terminated", 0)


def test_one_that_was_begun_by_a_launcher_that_died_is_ended(
    kubernetes_fixture: KubernetesFixture, control: ControlPlane
) -> None:
    fixture = kubernetes_fixture
    (one,) = fixture.requested(1)
    fixture.cluster.faults.append(Fault("POST", "secrets"))
    with pytest.raises(LaunchUnclear):
        fixture.provider.launch([one])
    eventually(lambda: control.sweep() or control.row(one)[0] == "failed")
    eventually(lambda: not fixture.cluster.objects("jobs"), within_s=20)


def test_throttling_makes_nothing(kubernetes_fixture: KubernetesFixture, control: ControlPlane) -> None:
    fixture = kubernetes_fixture
    requests = fixture.requested(2)
    with fixture.fault(Fault("POST", "jobs", 429, "TooManyRequests", "slow down", times=100)):
        with pytest.raises(InstanceFailed, match="slow down") as refused:
            fixture.provider.launch(requests)
        assert not isinstance(refused.value, LaunchUnclear)
    assert fixture.cluster.objects("jobs") == []


def test_credentials_that_expire_are_read_again(kubernetes_fixture: KubernetesFixture, control: ControlPlane) -> None:
    fixture = kubernetes_fixture
    (one,) = _running(fixture, 1)
    with in_background(control.watch):
        eventually(lambda: "WATCH pods" in fixture.cluster.requests)
        fixture.cluster.token = "renewed"
        fixture.cluster.cut_watches()
        with pytest.raises(InstanceFailed):
            fixture.provider.alive()
        fixture.cluster.kubeconfig(Path(str(fixture.settings.kubeconfig)).parent)
        assert set(fixture.provider.alive()) == {one.instance_id}
        fixture.end(one.instance_id, "", 7)
        assert control.ended(one) == ("failed", 7)


@pytest.mark.usefixtures("watching")
def test_a_queue_that_is_named_lets_instances_go_on(
    kubernetes_fixture: KubernetesFixture, control: ControlPlane
) -> None:
    fixture = kubernetes_fixture
    parts = fixture.settings.home / "queued.yaml"
    assert fixture.settings.kubernetes_job is not None
    labels = {"metadata": {"labels": {QUEUE: "agents"}}}
    parts.write_text(fixture.settings.kubernetes_job.read_text() + json.dumps(labels)[1:-1] + "\n")
    settings = fixture.settings.model_copy(update={"kubernetes_job": parts})
    queued = KubernetesInstances(settings)
    (one,) = fixture.requested(1)
    handles = queued.launch([one])
    assert queued.launch([one]) == handles == queued.alive()
    instances.launched(fixture.database, handles)
    threading.Event().wait(0.5)
    control.sweep()  # it has waited for longer than an instance may take to boot
    assert fixture.pods() == []
    assert queued.started() == {one.instance_id: None}
    with Client(configuration(settings)) as kueue:  # in whose place we stand
        kueue.patch(Job, job_name(one.instance_id), {"spec": {"suspend": False}})
    eventually(lambda: fixture.made(one.instance_id) == 1, within_s=20)
    assert queued.started()[one.instance_id] is not None
    fixture.end(one.instance_id, "", 0)
    assert control.ended(one) == ("terminated", 0)
