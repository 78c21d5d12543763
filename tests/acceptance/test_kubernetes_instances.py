"""Instances as Jobs: a real stack, the worker image, and the tests' API server, whose pods are containers."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from sqlalchemy import text

import app
from app.client import MegaFlow, Run
from app.evaluation import Submission
from app.instances.docker import DockerInstances
from app.models.spec import Mode
from app.models.states import AttemptState
from app.settings import PREFIX, Settings
from app.stack import lifecycle
from tests.acceptance.test_docker_instances import slow_task
from tests.kubernetes import FakeCluster
from tests.kubernetes.controllers import conditions
from tests.services import free_port, missing, short_folder
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(900)]  # the first builds the worker image

ROOT = Path(app.__file__).parent.parent


@dataclass(frozen=True)
class Stack:
    settings: Settings
    flow: MegaFlow
    cluster: FakeCluster

    def submit(self, dataset: str = "demo") -> Run:
        return self.flow.submit(Submission(dataset=dataset, agent="oracle", mode=Mode.EPHEMERAL))

    def instances(self) -> list[tuple[str, str, int | None]]:
        """Provider, state and exit code of every ephemeral instance there ever was."""
        with self.flow.database.begin() as connection:
            query = text("SELECT provider, state, exit_code FROM instances WHERE mode = 'ephemeral'")
            return [(row.provider, row.state, row.exit_code) for row in connection.execute(query)]


@pytest.fixture(scope="module")
def worker_image(base_image_tag: str) -> str:
    """Built when the engine has none with this content."""
    tag = os.environ.get("WORKER_TAG", "megaflow/worker:latest")
    environment = os.environ | {"VENV": sys.prefix, "BASE_IMAGE": base_image_tag, "WORKER_TAG": tag}
    script = str(ROOT / "scripts" / "worker-image")
    done = subprocess.run(["sh", script], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        missing(f"the worker image: {done.stderr.strip()[-500:]}")
    return tag


def _parts(settings: Settings) -> str:
    """Pods on the host's network that see what instances in containers see: the embedded servers, the engine."""
    shared = list(DockerInstances(settings)._shared())
    volumes = [{"name": f"v{at}", "hostPath": {"path": str(path.resolve())}} for at, (path, _) in enumerate(shared)]
    mounts = [{"name": f"v{at}", "mountPath": str(path)} for at, (path, _) in enumerate(shared)]
    pod = {"hostNetwork": True, "volumes": volumes, "containers": [{"name": "worker", "volumeMounts": mounts}]}
    return yaml.safe_dump({"spec": {"template": {"spec": pod}}})


@pytest.fixture(scope="module")
def stack(worker_image: str) -> Iterator[Stack]:
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch, FakeCluster(nodes=("one", "two")) as cluster:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            patch.delenv(name)
        settings = Settings(
            home=folder / "h",
            installation=f"test-{uuid.uuid4().hex[:8]}",
            ephemeral_provider="kubernetes",
            persistent_provider="kubernetes",
            persistent_instances=0,
            ephemeral_capacity=3,
            kubeconfig=cluster.kubeconfig(folder),
            kubernetes_job=folder / "job.yaml",
            worker_image=worker_image,
            flower_port=free_port(),
            web_port=free_port(),
            replay_port=free_port(),
            gateway_port=free_port(),
        )
        (folder / "job.yaml").write_text(_parts(settings))
        try:
            lifecycle.up(settings, print, may_install=False)
            with MegaFlow(settings) as flow:
                yield Stack(settings, flow, cluster)
        finally:
            lifecycle.down(settings, print, purge=True)
        eventually(lambda: not _left(cluster), "nothing left", within_s=60)


def _left(cluster: FakeCluster) -> list[str]:
    """Jobs that failed stay for ten minutes, each with its Secret and its log, and the cluster removes them."""
    kept = {job["metadata"]["name"] for job in cluster.objects("jobs") if "Failed" in conditions(job)}
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
    (handle,) = stack.submit(str(slow_task(tmp_path))).handles
    eventually(lambda: handle.status() == "running", within_s=120)
    pods = [pod for pod in stack.cluster.objects("pods") if pod["metadata"]["labels"]["megaflow.mode"] == "ephemeral"]
    (pod,) = (one for one in pods if one["status"]["phase"] == "Running")
    stack.cluster.take_node(pod["spec"]["nodeName"])
    result = handle.result(timeout=240)
    assert result.reward == 1.0
    assert [attempt.state for attempt in result.attempts] == [AttemptState.LOST, AttemptState.FINISHED]


def test_down_ends_what_the_cluster_has(stack: Stack, tmp_path: Path) -> None:
    """Last of this file; the fixture's end looks at what is left."""
    task = slow_task(tmp_path)
    solution = task / "solution" / "solve.sh"
    solution.write_text(solution.read_text().replace("sleep 5", "sleep 600"))
    run = stack.submit(str(task))
    eventually(lambda: run.handles[0].status() == "running", within_s=120)
    said: list[str] = []
    lifecycle.down(stack.settings, said.append)
    assert [line for line in said if line.endswith("instances beyond this host")]
    eventually(lambda: not _left(stack.cluster), within_s=60)
