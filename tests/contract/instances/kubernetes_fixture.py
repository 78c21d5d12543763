"""The provider `kubernetes` before the tests' API server, whose pods are containers with a script for a worker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from lightkube import Client
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod, Secret

import app
from app.instances.kubernetes import KubernetesInstances
from app.instances.kubernetes_job import INSTANCE, job_name, labels_of
from app.kubernetes import configuration
from app.ledger.database import Database
from app.settings import Settings
from tests.contract.instances.fixture import WORKER, ProviderFixture, leave
from tests.kubernetes import FakeCluster, Fault, kubeconfig
from tests.kubernetes.controllers import ENDED, conditions
from tests.kubernetes.store import Object
from tests.services import free_port
from tests.waiting import eventually


class KubernetesFixture(ProviderFixture):
    abilities = frozenset({"codes", "grace", "capacity", "lost_reply"})

    def __init__(self, settings: Settings, database: Database, cluster: FakeCluster) -> None:
        super().__init__(settings, database, KubernetesInstances(settings))
        self.cluster = cluster

    def objects(self, plural: str) -> list[Object]:
        """All of a kind that the API server has of this installation."""
        return self.cluster.objects(plural)

    def unreachable(self) -> KubernetesInstances:
        return KubernetesInstances(self.settings.model_copy(update={"kubeconfig": nowhere(self.settings.home)}))

    def made(self, instance_id: UUID) -> int:
        """Pods whose worker runs: one that ends earlier says nothing. A Job that is deleted counts until it is gone."""
        running = [one for one in self.pods(instance_id) if one["status"]["phase"] == "Running"]
        ending = [one for one in self._standing_jobs(instance_id) if "deletionTimestamp" in one["metadata"]]
        return max(len(running), len(ending))

    def pods(self, instance_id: UUID | None = None) -> list[Object]:
        """Those that have not ended, of one instance or of all."""
        found = [one for one in self.objects("pods") if one["status"]["phase"] not in ENDED]
        return [one for one in found if instance_id is None or _of(one, instance_id)]

    def shown(self, handle: str) -> str:
        return json.dumps([*self.objects("jobs"), *self.objects("pods")])

    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        leave(self.settings, instance_id, code)

    def take_away(self, handle: str) -> None:
        (pod,) = (one for one in self.pods() if one["metadata"]["labels"]["job-name"] == handle)
        self.cluster.evict(pod["metadata"]["name"])

    def left(self) -> list[str]:
        """Jobs that have failed stay for ten minutes, each with its Secret, and are removed by the cluster."""
        kept = {one["metadata"]["name"] for one in self.objects("jobs") if "Failed" in conditions(one)}
        secrets = {one["metadata"]["name"] for one in self.objects("secrets")} - kept
        jobs = {one["metadata"]["name"] for one in self.objects("jobs")} - kept
        return [*jobs, *secrets, *(one["metadata"]["name"] for one in self.pods())]

    @contextmanager
    def losing_replies(self) -> Iterator[None]:
        with self.fault(Fault("POST", "jobs", after=True, times=1000)):
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        with self.fault(Fault("POST", "jobs", 403, "Forbidden", "exceeded quota: jobs", times=1000)):
            yield

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """It is met for the block."""
        self.cluster.faults.append(fault)
        yield
        self.cluster.faults.remove(fault)

    def _standing_jobs(self, instance_id: UUID) -> list[Object]:
        found = [one for one in self.objects("jobs") if _of(one, instance_id)]
        return [one for one in found if not {"Complete", "Failed"} & conditions(one).keys()]


class RealFixture(KubernetesFixture):
    """Before the cluster that TEST_KUBECONFIG leads to. Its pods run the worker's script in TEST_IMAGE."""

    abilities = frozenset({"codes", "grace"})
    slow_s = 120.0

    def __init__(self, settings: Settings, database: Database, client: Client) -> None:
        ProviderFixture.__init__(self, settings, database, KubernetesInstances(settings))
        self._client = client

    def objects(self, plural: str) -> list[Object]:
        kind: Any = {"jobs": Job, "pods": Pod, "secrets": Secret}[plural]
        found = self._client.list(kind, labels=labels_of(self.settings))
        return [one.to_dict() for one in found]

    def unreachable(self) -> KubernetesInstances:
        return KubernetesInstances(self.settings.model_copy(update={"kubeconfig": nowhere(self.settings.home)}))

    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        eventually(lambda: self.made(instance_id), within_s=self.slow_s)
        (pod,) = self.pods(instance_id)
        folder = self.settings.home / "logs" / "instances"
        script = f"mkdir -p {folder}; cd {folder}; echo {code} > new; mv new {instance_id}.end"
        self._client.exec(pod["metadata"]["name"], command=["sh", "-c", script], raise_on_error=True)

    def take_away(self, handle: str) -> None:
        for pod in self.pods():
            if pod["metadata"]["labels"]["job-name"] == handle:
                self._client.delete(Pod, pod["metadata"]["name"], grace_period=0)


def nowhere(folder: Path) -> Path:
    """A file that leads to a port of this host where nobody listens."""
    return kubeconfig(folder / "elsewhere", f"http://127.0.0.1:{free_port()}", "none")


def _of(one: Object, instance_id: UUID) -> bool:
    named = one["metadata"]["name"] == job_name(instance_id)
    return named or one["metadata"]["labels"].get(INSTANCE) == str(instance_id)


@pytest.fixture
def kubernetes_fixture(request: pytest.FixtureRequest, settings: Settings, database: Database, tmp_path: Path) -> Any:
    """A fake, or the user's own cluster."""
    if (config := os.environ.get("TEST_KUBECONFIG")) is None:
        yield from _fake(settings, database, request.getfixturevalue("waiting_image"), tmp_path)
        return
    container = {"name": "worker", "command": ["/bin/sh", "-c", WORKER, "worker"]}
    parts = tmp_path / "job.yaml"
    parts.write_text(yaml.safe_dump({"spec": {"template": {"spec": {"containers": [container]}}}}))
    change = {"kubernetes_job": parts, "worker_image": os.environ["TEST_IMAGE"]}
    settings = settings.model_copy(update={**change, "kubeconfig": Path(config)})
    with Client(configuration(settings)) as client:
        yield RealFixture(settings, database, client)


def _fake(settings: Settings, database: Database, waiting_image: str, tmp_path: Path) -> Iterator[KubernetesFixture]:
    volumes = [{"name": "home", "hostPath": {"path": str(settings.home)}}]
    mounts = [{"name": "home", "mountPath": str(settings.home)}]
    pod = {"volumes": volumes, "containers": [{"name": "worker", "volumeMounts": mounts}]}
    parts = tmp_path / "job.yaml"
    parts.write_text(yaml.safe_dump({"spec": {"template": {"spec": pod}}}))
    with FakeCluster(nodes=("node-1", "node-2")) as cluster:
        change = {"kubeconfig": cluster.kubeconfig(tmp_path), "kubernetes_job": parts, "worker_image": waiting_image}
        yield KubernetesFixture(settings.model_copy(update=change), database, cluster)
        assert set(cluster.requests) <= granted("control"), "its account may not do this"


_VERBS = {
    "create": "POST",
    "get": "GET",
    "list": "GET",
    "watch": "WATCH",
    "patch": "PATCH",
    "delete": "DELETE",
    "update": "PUT",
}


def granted(role: str) -> set[str]:
    """What deploy/kubernetes/10-accounts.yaml lets an account do, in the words of `FakeCluster.requests`."""
    file = Path(app.__file__).parent.parent / "deploy" / "kubernetes" / "10-accounts.yaml"
    manifests = yaml.safe_load_all(file.read_text())
    (found,) = (one for one in manifests if (one["kind"], one["metadata"]["name"]) == ("Role", role))
    return {
        f"{_VERBS[verb]} {plural}" for rule in found["rules"] for plural in rule["resources"] for verb in rule["verbs"]
    }
