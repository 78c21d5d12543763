"""Instances as Jobs: a real stack, the worker image, and the tests' API server, whose pods are containers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from app import evaluation
from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.images.task_images import Images
from app.instances.docker import DockerInstances
from app.models.spec import EnvironmentKind, EnvironmentSpec
from app.models.states import AttemptState
from app.settings import Settings
from app.stack import lifecycle
from tests.acceptance.conftest import System, bare_folder, slow_task, up
from tests.kubernetes import FakeCluster
from tests.kubernetes.controllers import conditions
from tests.services import settings_in
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(900)]  # the first builds the worker image


@dataclass
class Stack(System):
    cluster: FakeCluster

    def instances(self) -> list[tuple[str, str, int | None]]:
        """Provider, state and exit code of every ephemeral instance there ever was."""
        return list(map(tuple, self.rows("SELECT provider, state, exit_code FROM instances WHERE mode = 'ephemeral'")))


def _parts(settings: Settings) -> str:
    """Pods on the host's network that see what instances in containers see: the embedded servers, the engine.

    They reach the API server by the file of this process: its pods have no accounts.
    """
    shared = [*DockerInstances(settings)._shared(), (Path(str(settings.kubeconfig)), "ro")]
    volumes = [{"name": f"v{at}", "hostPath": {"path": str(path.resolve())}} for at, (path, _) in enumerate(shared)]
    mounts = [{"name": f"v{at}", "mountPath": str(path)} for at, (path, _) in enumerate(shared)]
    env = [{"name": "MEGAFLOW_KUBECONFIG", "value": str(settings.kubeconfig)}]
    worker = {"name": "worker", "volumeMounts": mounts, "env": env}
    pod = {"hostNetwork": True, "volumes": volumes, "containers": [worker]}
    return yaml.safe_dump({"spec": {"template": {"spec": pod}}})


@pytest.fixture(scope="module")
def stack(worker_image: str) -> Iterator[Stack]:
    with bare_folder() as folder, FakeCluster(nodes=("one", "two")) as cluster:
        settings = settings_in(
            folder,
            ephemeral_provider="kubernetes",
            persistent_provider="kubernetes",
            persistent_instances=0,
            ephemeral_capacity=3,
            kubeconfig=cluster.kubeconfig(folder),
            kubernetes_job=folder / "job.yaml",
            kubernetes_environments="tasks",
            worker_image=worker_image,
        )
        (folder / "job.yaml").write_text(_parts(settings))
        with up(settings) as flow:
            yield Stack(settings, flow, cluster)
        eventually(lambda: not _left(cluster), "nothing left", within_s=60)


def _left(cluster: FakeCluster) -> list[str]:
    """Jobs that failed, or ended after the control worker, are removed by the cluster, each with its Secret and log."""
    ends = {"Complete", "Failed"}
    kept = {job["metadata"]["name"] for job in cluster.objects("jobs") if ends & conditions(job).keys()}
    found = [one for plural in ("jobs", "pods", "secrets") for one in cluster.objects(plural)]
    return [one["metadata"]["name"] for one in found if not one["metadata"]["name"].startswith(tuple(kept) or "!")]


def test_the_demo_dataset_is_solved_by_jobs_each_with_one_pod(stack: Stack) -> None:
    results = stack.submit().results(timeout=600)
    assert len(results) == 12
    assert {result.reward for result in results} == {1.0}
    eventually(lambda: {end[1] for end in stack.instances()} == {"terminated"}, within_s=60)
    ends = stack.instances()
    assert ends == [("kubernetes", "terminated", 0)] * len(ends)
    assert stack.cluster.requests.count("POST jobs") >= len(ends) >= 12


def test_a_task_whose_node_is_taken_away_finishes_on_another(stack: Stack, tmp_path: Path) -> None:
    (handle,) = stack.submit(dataset=str(slow_task(tmp_path))).handles
    eventually(lambda: handle.status() == "running", within_s=120)
    pods = [pod for pod in stack.cluster.objects("pods") if pod["metadata"]["labels"]["megaflow.mode"] == "ephemeral"]
    (pod,) = (one for one in pods if one["status"]["phase"] == "Running")
    stack.cluster.take_node(pod["spec"]["nodeName"])
    result = handle.result(timeout=240)
    assert result.reward == 1.0
    assert [attempt.state for attempt in result.attempts] == [AttemptState.LOST, AttemptState.FINISHED]


def test_an_instance_in_a_pod_makes_its_environment_as_another_pod(stack: Stack) -> None:
    tasks = evaluation.demo_tasks(stack.settings, EnvironmentKind.KUBERNETES)
    task = next(task for task in tasks if task.name == "csv-to-jsonl")
    store = open_store(stack.settings.artifacts())
    images = Images(stack.settings, fetch_bundle=lambda bundle: fetch_bundle(store, bundle))
    image = images.ensure(EnvironmentSpec(build=task.environment.build), timeout_s=200)
    environment = task.environment.model_copy(update={"build": None, "image": image})
    before = stack.cluster.requests.count("POST pods")
    run = stack.flow.enqueue_many(
        [task.model_copy(update={"environment": environment})], agent="oracle", mode="ephemeral"
    )
    result = run.handles[0].result(timeout=240)
    assert result.reward == 1.0
    assert result.attempt is not None
    assert result.attempt.environment["kind"] == "kubernetes"
    assert stack.cluster.requests.count("POST pods") > before  # Jobs make theirs without a request
    eventually(
        lambda: not [one for one in stack.cluster.objects("pods") if one["metadata"]["namespace"] == "tasks"],
        "the environment's pod is gone",
        within_s=60,
    )


def test_down_ends_what_the_cluster_has(stack: Stack, tmp_path: Path) -> None:
    """Last of this file; the fixture's end looks at what is left."""
    run = stack.submit(dataset=str(slow_task(tmp_path, 600)))
    eventually(lambda: run.handles[0].status() == "running", within_s=120)
    said: list[str] = []
    lifecycle.down(stack.settings, said.append)
    assert [line for line in said if line.endswith("instances beyond this host")]
    eventually(lambda: not _left(stack.cluster), within_s=60)
