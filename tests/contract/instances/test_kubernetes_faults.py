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
from tests.contract.instances.kubernetes_ground import KubernetesGround
from tests.kubernetes import Fault
from tests.waiting import eventually, in_background

pytestmark = [pytest.mark.docker, pytest.mark.extra]


@pytest.fixture
def control(kubernetes_ground: KubernetesGround) -> Iterator[ControlPlane]:
    ground = kubernetes_ground
    if not hasattr(ground, "cluster"):
        pytest.skip("a real cluster, whose API server these tests may not break")
    yield ControlPlane(ground, RetryPolicy(0.0, 1.0))
    for instance_id, handle in ground.provider.alive().items():
        ground.provider.terminate(instance_id, handle, grace_s=0)
    eventually(lambda: not ground.provider.alive() and not ground.left(), "nothing left", within_s=20)


@pytest.fixture
def watching(kubernetes_ground: KubernetesGround, control: ControlPlane) -> Iterator[None]:
    """The watch is open."""
    with in_background(control.watch):
        eventually(lambda: "WATCH pods" in kubernetes_ground.cluster.requests)
        yield


def _running(ground: KubernetesGround, count: int) -> list[InstanceRequest]:
    requests = ground.requested(count)
    instances.launched(ground.database, ground.provider.launch(requests))
    eventually(lambda: [ground.made(r.instance_id) for r in requests] == [1] * count, within_s=20)
    return requests


def _pod_of(ground: KubernetesGround, request: InstanceRequest) -> dict[str, dict[str, str]]:
    (pod,) = ground.pods(request.instance_id)
    return pod


def _why(ground: KubernetesGround, request: InstanceRequest) -> str:
    """The reason of its end, as the ledger has it."""
    with ground.database.begin() as connection:
        query = "SELECT data ->> 'why' FROM events WHERE instance_id = %s AND kind LIKE 'instance.%%ed'"
        return str(connection.exec_driver_sql(query, (request.instance_id,)).scalars().all())


@pytest.mark.usefixtures("watching")
def test_a_watch_that_is_cut_goes_on_where_it_was(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    one, two = _running(ground, 2)
    lists = ground.cluster.requests.count("GET pods")
    ground.cluster.cut_watches()
    ground.end(one.instance_id, "", 7)
    assert control.ended(one) == ("failed", 7)
    ground.cluster.cut_watches()
    ground.end(two.instance_id, "", 0)
    assert control.ended(two) == ("terminated", 0)
    assert ground.cluster.requests.count("GET pods") == lists, "nothing was listed again"


@pytest.mark.usefixtures("watching")
def test_a_version_that_is_forgotten_is_answered_by_a_list(
    kubernetes_ground: KubernetesGround, control: ControlPlane
) -> None:
    ground = kubernetes_ground
    ground.cluster.bookmark_s = 3600  # the watch does not learn that versions go on
    (one,) = _running(ground, 1)
    lists = ground.cluster.requests.count("GET pods")
    ground.cluster.forget()
    ground.cluster.cut_watches()
    ground.end(one.instance_id, "", 7)
    assert control.ended(one) == ("failed", 7)
    assert ground.cluster.requests.count("GET pods") > lists


@pytest.mark.usefixtures("watching")
def test_a_bookmark_spares_a_list(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    ground.cluster.bookmark_s = 0.1
    (one,) = _running(ground, 1)
    ground.cluster.forget()
    threading.Event().wait(1.0)  # bookmarks say so
    lists, watches = (ground.cluster.requests.count(f"{verb} pods") for verb in ("GET", "WATCH"))
    ground.cluster.cut_watches()
    eventually(lambda: ground.cluster.requests.count("WATCH pods") > watches)
    ground.end(one.instance_id, "", 0)
    assert control.ended(one) == ("terminated", 0)
    assert ground.cluster.requests.count("GET pods") == lists


def test_a_watch_that_says_nothing_is_opened_again(
    kubernetes_ground: KubernetesGround, control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost connection tells nobody; the client itself would wait for ever."""
    ground = kubernetes_ground
    monkeypatch.setattr(kubernetes, "_SILENT_S", 0.5)
    ground.cluster.bookmark_s = 3600
    with in_background(control.watch):
        eventually(lambda: ground.cluster.requests.count("WATCH pods") >= 3)


@pytest.mark.usefixtures("watching")
def test_an_api_server_that_restarts(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    one, two = _running(ground, 2)
    ground.cluster.stop()
    ground.end(one.instance_id, "", 7)
    with pytest.raises(InstanceFailed):
        ground.provider.alive()
    threading.Event().wait(1.5)
    ground.cluster.forget()
    ground.cluster.start()
    assert control.ended(one) == ("failed", 7)
    assert set(ground.provider.launch([two])) == {two.instance_id}
    assert len(ground.pods()) == 1
    # It does not register within the boot timeout of these settings.
    eventually(lambda: control.sweep() or control.row(two)[0] == "failed")
    eventually(lambda: not ground.pods(), within_s=20)


@pytest.mark.usefixtures("watching")
def test_a_node_that_is_taken_away(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    requests = _running(ground, 2)
    nodes = {_pod_of(ground, one)["spec"]["nodeName"]: one for one in requests}
    ground.cluster.take_node("node-1")
    lost, other = nodes["node-1"], nodes["node-2"]
    assert control.ended(lost)[0] == "failed"
    assert "NodeLost" in _why(ground, lost)
    assert set(ground.provider.alive()) == {other.instance_id}
    assert len(ground.pods()) == 1, "the Job makes no other pod"


@pytest.mark.usefixtures("watching")
def test_a_pod_that_is_evicted(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    (one,) = _running(ground, 1)
    ground.cluster.evict(_pod_of(ground, one)["metadata"]["name"])
    assert control.ended(one)[0] == "failed"
    assert "Evicted" in _why(ground, one)
    eventually(lambda: ground.provider.alive() == {}, within_s=20)


@pytest.mark.usefixtures("watching")
def test_a_lifetime_that_is_over_is_named(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    (one,) = ground.requested(lifetime_s=2.0)
    ground.provider.launch([one])
    assert control.ended(one)[1] in (75, None)
    eventually(lambda: ground.provider.alive() == {}, within_s=20)
    assert "DeadlineExceeded" in _why(ground, one)


@pytest.mark.parametrize("step", ["POST secrets", "PATCH jobs"])
@pytest.mark.parametrize("done", [True, False])
def test_an_answer_that_is_lost_midway_leaves_one_instance_that_works(
    kubernetes_ground: KubernetesGround, control: ControlPlane, step: str, done: bool
) -> None:
    ground = kubernetes_ground
    (one,) = ground.requested(1)
    method, plural = step.split()
    ground.cluster.faults.append(Fault(method, plural, after=done))
    with pytest.raises(LaunchUnclear):
        ground.provider.launch([one])
    assert set(ground.provider.alive()) == {one.instance_id}
    instances.launched(ground.database, ground.provider.launch([one]))
    eventually(lambda: ground.made(one.instance_id) == 1, within_s=20)
    assert len(ground.cluster.objects("jobs")) == len(ground.cluster.objects("secrets")) == 1
    ground.end(one.instance_id, "", 0)
    with in_background(control.watch):
        assert control.ended(one) == ("terminated", 0)


def test_one_that_was_begun_by_a_launcher_that_died_is_ended(
    kubernetes_ground: KubernetesGround, control: ControlPlane
) -> None:
    ground = kubernetes_ground
    (one,) = ground.requested(1)
    ground.cluster.faults.append(Fault("POST", "secrets"))
    with pytest.raises(LaunchUnclear):
        ground.provider.launch([one])
    eventually(lambda: control.sweep() or control.row(one)[0] == "failed")
    eventually(lambda: not ground.cluster.objects("jobs"), within_s=20)


def test_throttling_makes_nothing(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    requests = ground.requested(2)
    with ground.fault(Fault("POST", "jobs", 429, "TooManyRequests", "slow down", times=100)):
        with pytest.raises(InstanceFailed, match="slow down") as refused:
            ground.provider.launch(requests)
        assert not isinstance(refused.value, LaunchUnclear)
    assert ground.cluster.objects("jobs") == []


def test_credentials_that_expire_are_read_again(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    (one,) = _running(ground, 1)
    with in_background(control.watch):
        eventually(lambda: "WATCH pods" in ground.cluster.requests)
        ground.cluster.token = "renewed"
        ground.cluster.cut_watches()
        with pytest.raises(InstanceFailed):
            ground.provider.alive()
        ground.cluster.kubeconfig(Path(str(ground.settings.kubeconfig)).parent)
        assert set(ground.provider.alive()) == {one.instance_id}
        ground.end(one.instance_id, "", 7)
        assert control.ended(one) == ("failed", 7)


@pytest.mark.usefixtures("watching")
def test_a_queue_that_is_named_lets_instances_go_on(kubernetes_ground: KubernetesGround, control: ControlPlane) -> None:
    ground = kubernetes_ground
    parts = ground.settings.home / "queued.yaml"
    assert ground.settings.kubernetes_job is not None
    labels = {"metadata": {"labels": {QUEUE: "agents"}}}
    parts.write_text(ground.settings.kubernetes_job.read_text() + json.dumps(labels)[1:-1] + "\n")
    settings = ground.settings.model_copy(update={"kubernetes_job": parts})
    queued = KubernetesInstances(settings)
    (one,) = ground.requested(1)
    handles = queued.launch([one])
    assert queued.launch([one]) == handles == queued.alive()
    instances.launched(ground.database, handles)
    threading.Event().wait(0.5)
    control.sweep()  # it has waited for longer than an instance may take to boot
    assert ground.pods() == []
    assert queued.started() == {one.instance_id: None}
    with Client(configuration(settings)) as kueue:  # in whose place we stand
        kueue.patch(Job, job_name(one.instance_id), {"spec": {"suspend": False}})
    eventually(lambda: ground.made(one.instance_id) == 1, within_s=20)
    assert queued.started()[one.instance_id] is not None
    ground.end(one.instance_id, "", 0)
    assert control.ended(one) == ("terminated", 0)
