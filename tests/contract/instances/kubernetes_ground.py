"""The provider `kubernetes` before the tests' API server, whose pods are containers with a script for a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest
import yaml

from app.instances.kubernetes import KubernetesInstances
from app.instances.kubernetes_job import INSTANCE, job_name
from app.ledger.database import Database
from app.settings import Settings
from tests.contract.instances.ground import ProviderGround, leave
from tests.kubernetes import FakeCluster, Fault
from tests.kubernetes.controllers import ENDED, conditions
from tests.kubernetes.store import Object
from tests.services import free_port


class KubernetesGround(ProviderGround):
    abilities = frozenset({"codes", "grace", "capacity", "lost_reply"})

    def __init__(self, settings: Settings, database: Database, cluster: FakeCluster) -> None:
        super().__init__(settings, database, KubernetesInstances(settings))
        self.cluster = cluster

    def unreachable(self) -> KubernetesInstances:
        assert self.settings.kubeconfig is not None
        elsewhere = self.settings.home / "elsewhere"
        elsewhere.write_text(self.settings.kubeconfig.read_text().replace(str(self.cluster.port), str(free_port())))
        return KubernetesInstances(self.settings.model_copy(update={"kubeconfig": elsewhere}))

    def made(self, instance_id: UUID) -> int:
        """Pods whose worker runs: one that ends earlier says nothing. A Job that is deleted counts until it is gone."""
        running = [one for one in self.pods(instance_id) if one["status"]["phase"] == "Running"]
        ending = [one for one in self._standing_jobs(instance_id) if "deletionTimestamp" in one["metadata"]]
        return max(len(running), len(ending))

    def pods(self, instance_id: UUID | None = None) -> list[Object]:
        """Those that have not ended, of one instance or of all."""
        found = [one for one in self.cluster.objects("pods") if one["status"]["phase"] not in ENDED]
        return [one for one in found if instance_id is None or _of(one, instance_id)]

    def shown(self, handle: str) -> str:
        return json.dumps([*self.cluster.objects("jobs"), *self.cluster.objects("pods")])

    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        leave(self.settings, instance_id, code)

    def take_away(self, handle: str) -> None:
        (pod,) = (one for one in self.pods() if one["metadata"]["labels"]["job-name"] == handle)
        self.cluster.evict(pod["metadata"]["name"])

    def left(self) -> list[str]:
        """Jobs that have failed stay for ten minutes, each with its Secret, and are removed by the cluster."""
        kept = {one["metadata"]["name"] for one in self.cluster.objects("jobs") if "Failed" in conditions(one)}
        secrets = {one["metadata"]["name"] for one in self.cluster.objects("secrets")} - kept
        jobs = {one["metadata"]["name"] for one in self.cluster.objects("jobs")} - kept
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
        found = [one for one in self.cluster.objects("jobs") if _of(one, instance_id)]
        return [one for one in found if not {"Complete", "Failed"} & conditions(one).keys()]


def _of(one: Object, instance_id: UUID) -> bool:
    named = one["metadata"]["name"] == job_name(instance_id)
    return named or one["metadata"]["labels"].get(INSTANCE) == str(instance_id)


@pytest.fixture
def kubernetes_ground(
    settings: Settings, database: Database, waiting_image: str, tmp_path: Path
) -> Iterator[KubernetesGround]:
    volumes = [{"name": "home", "hostPath": {"path": str(settings.home)}}]
    mounts = [{"name": "home", "mountPath": str(settings.home)}]
    pod = {"volumes": volumes, "containers": [{"name": "worker", "volumeMounts": mounts}]}
    parts = tmp_path / "job.yaml"
    parts.write_text(yaml.safe_dump({"spec": {"template": {"spec": pod}}}))
    with FakeCluster(nodes=("node-1", "node-2")) as cluster:
        change = {"kubeconfig": cluster.kubeconfig(tmp_path), "kubernetes_job": parts, "worker_image": waiting_image}
        yield KubernetesGround(settings.model_copy(update=change), database, cluster)
