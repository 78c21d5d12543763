"""The fake API server, as lightkube sees it; with an engine, its pods and commands in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import docker
import pytest
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.exceptions import ObjectDeleted
from lightkube.models.batch_v1 import JobSpec
from lightkube.models.core_v1 import Container, PodSpec, PodTemplateSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod, Secret
from lightkube.types import CascadeType

from tests.kubernetes import FakeCluster, Fault
from tests.waiting import eventually

pytestmark = pytest.mark.docker


@pytest.fixture
def cluster(docker_engine: str) -> Iterator[FakeCluster]:
    with FakeCluster() as made:
        yield made


@pytest.fixture
def client(cluster: FakeCluster, tmp_path: Path) -> Iterator[Client]:
    with Client(KubeConfig.from_file(cluster.kubeconfig(tmp_path)).get()) as made:
        yield made


def _secret(name: str, **labels: str) -> Secret:
    return Secret(metadata=ObjectMeta(name=name, labels=labels), stringData={"a": "b"})


def _pod(image: str, script: str, name: str = "p") -> Pod:
    spec = PodSpec([Container("main", image=image, command=["sh", "-c", script])], restartPolicy="Never")
    return Pod(metadata=ObjectMeta(name=name), spec=spec)


def _job(image: str, script: str, **more: object) -> Job:
    template = PodTemplateSpec(spec=_pod(image, script).spec)
    return Job(metadata=ObjectMeta(name="j"), spec=JobSpec(template=template, backoffLimit=0, **more))  # type: ignore[arg-type]


def _conditions(client: Client) -> dict[str, str | None]:
    job = client.get(Job, "j")
    return {one.type: one.reason for one in (job.status and job.status.conditions) or () if one.status == "True"}


def test_objects_have_versions_and_selectors_choose(cluster: FakeCluster, client: Client) -> None:
    made = client.create(_secret("s1", app="x", tier="a"))
    assert made.metadata.uid
    assert made.data == {"a": "Yg=="}
    client.create(_secret("s2", app="y"))
    with pytest.raises(ApiError) as twice:
        client.create(_secret("s1"))
    assert (twice.value.status.code, twice.value.status.reason) == (409, "AlreadyExists")
    names = lambda **labels: [one.metadata.name for one in client.list(Secret, labels=labels)]  # noqa: E731
    assert names(app="x") == ["s1"]
    assert names(app="x", tier="b") == []
    with pytest.raises(ApiError, match="selector"):
        names(app=["x", "y"])
    stale = client.get(Secret, "s2")
    client.patch(Secret, "s2", {"data": {"a": "Yw=="}})
    with pytest.raises(ApiError) as conflict:
        client.replace(stale)
    assert conflict.value.status.reason == "Conflict"


def test_a_watch_goes_on_where_it_was_and_is_refused_when_that_is_forgotten(
    cluster: FakeCluster, client: Client
) -> None:
    first = client.create(_secret("s1"))
    client.create(_secret("s2"))
    version = first.metadata.resourceVersion
    seen = client.watch(Secret, resource_version=version)
    assert [(kind, one.metadata.name) for kind, one in (next(seen),)] == [("ADDED", "s2")]
    client.delete(Secret, "s1")
    kind, one = next(seen)
    assert (kind, one.metadata.name) == ("DELETED", "s1")
    cluster.forget()
    with pytest.raises(ApiError) as gone:
        next(client.watch(Secret, resource_version=version))
    assert gone.value.status.code == 410


def test_faults_are_met_once_and_a_restart_loses_nothing(cluster: FakeCluster, client: Client) -> None:
    cluster.faults.append(Fault("POST", "secrets", 403, "Forbidden", "exceeded quota"))
    with pytest.raises(ApiError, match="exceeded quota"):
        client.create(_secret("s1"))
    cluster.faults.append(Fault("POST", "secrets", after=True))
    with pytest.raises(Exception, match=r"disconnected|[Rr]eset|closed"):
        client.create(_secret("s1"))
    assert client.get(Secret, "s1").metadata.name == "s1"  # made, and the answer was lost
    cluster.stop()
    with pytest.raises(Exception, match="refused"):
        client.get(Secret, "s1")
    cluster.start()
    assert client.get(Secret, "s1").metadata.name == "s1"


def test_commands_in_a_pod(client: Client, base_image_tag: str) -> None:
    client.create(_pod(base_image_tag, "sleep 60"))
    eventually(lambda: client.get(Pod, "p").status.phase == "Running", within_s=30)
    done = client.exec(
        "p", command=["sh", "-c", "cat; echo no >&2; exit 7"], stdin="a" * 300_000, stdout=True, stderr=True
    )
    assert (done.exit_code, done.stdout, done.stderr) == (7, "a" * 300_000, "no\n")
    client.delete(Pod, "p", grace_period=1)
    with pytest.raises((ApiError, ObjectDeleted)):
        eventually(lambda: client.get(Pod, "p") is None, within_s=30)


def test_a_job_makes_one_pod_and_says_how_it_ended(client: Client, base_image_tag: str) -> None:
    client.create(_job(base_image_tag, "exit 3"))
    eventually(lambda: _conditions(client) == {"Failed": "BackoffLimitExceeded"}, within_s=30)
    (pod,) = client.list(Pod, labels={"job-name": "j"})
    assert pod.status.containerStatuses[0].state.terminated.exitCode == 3
    client.delete(Job, "j", cascade=CascadeType.FOREGROUND)
    eventually(lambda: not list(client.list(Pod)) and not list(client.list(Job)), within_s=30)


def test_a_job_waits_while_suspended_and_ends_at_its_deadline(client: Client, base_image_tag: str) -> None:
    client.create(_job(base_image_tag, "exec sleep 60", suspend=True, activeDeadlineSeconds=1))
    assert not list(client.list(Pod))
    client.patch(Job, "j", {"spec": {"suspend": False, "template": {"spec": {"terminationGracePeriodSeconds": 1}}}})
    eventually(lambda: len(list(client.list(Pod))) == 1, within_s=10)
    eventually(lambda: _conditions(client).get("Failed") == "DeadlineExceeded", within_s=30)
    assert not list(client.list(Pod))


def test_nothing_of_a_cluster_stays_in_the_engine(base_image_tag: str, tmp_path: Path) -> None:
    with closing(docker.from_env()) as engine:
        lost = engine.containers.create(base_image_tag, labels={"megaflow.tests.process": str(2**22 + 1)})
        with FakeCluster() as cluster, Client(KubeConfig.from_file(cluster.kubeconfig(tmp_path)).get()) as client:
            client.create(_pod(base_image_tag, "sleep 60"))
            eventually(lambda: client.get(Pod, "p").status.phase == "Running", within_s=30)
            labels = {"label": f"megaflow.tests.cluster={cluster.token[:12]}"}
            assert len(engine.containers.list(filters=labels)) == 1
        assert engine.containers.list(all=True, filters=labels) == []
        assert engine.containers.list(all=True, filters={"id": lost.id}) == [], "what a killed session left"
