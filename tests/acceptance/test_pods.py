"""The demo's tasks in pods, as a user submits them, through the tests' API server."""

from __future__ import annotations

from collections.abc import Iterator

import docker
import pytest

from app import evaluation
from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.images.references import built_for_all
from app.images.task_images import Images
from app.models.spec import AgentTask, Build, EnvironmentKind, EnvironmentSpec, TestsGoal
from tests.acceptance.conftest import System, running
from tests.kubernetes import FakeCluster
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(600)]

MIRROR = "registry.invalid/megaflow-test"
IN_PLACE = ("csv-to-jsonl", "order-ledger")
"""Graded in the agent's own pod; a task with tests of a repository is graded from a patch, in another."""


@pytest.fixture(scope="module")
def cluster(docker_engine: str) -> Iterator[FakeCluster]:
    with FakeCluster() as made:
        yield made


@pytest.fixture(scope="module")
def pods(base_image_tag: str, cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    file = cluster.kubeconfig(tmp_path_factory.mktemp("config"))
    with running(base_image_tag, kubeconfig=file, image_mirror=MIRROR) as found:
        yield found


def build_for_nodes(system: System, build: Build) -> None:
    """Have a recipe's image under the name by which nodes pull it, as `megaflow images sync` does in a registry."""
    here = system.settings.model_copy(update={"image_mirror": None})
    store = open_store(here.artifacts())
    images = Images(here, fetch_bundle=lambda bundle: fetch_bundle(store, bundle))
    found = images.ensure(EnvironmentSpec(build=build), timeout_s=200)
    engine = docker.from_env()
    engine.api.tag(found, *built_for_all(MIRROR, build, here.base_image).rsplit(":", 1))
    engine.close()


def chosen(system: System) -> list[AgentTask]:
    tasks = evaluation.demo_tasks(system.settings, EnvironmentKind.KUBERNETES)
    in_place = [task for task in tasks if task.name in IN_PLACE]
    assert len(in_place) == len(IN_PLACE)
    return [*in_place, next(task for task in tasks if isinstance(task.goal, TestsGoal))]


def test_the_demo_is_graded_right_in_pods(pods: System, cluster: FakeCluster) -> None:
    tasks = chosen(pods)
    for task in tasks:
        assert task.environment.build is not None
        build_for_nodes(pods, task.environment.build)
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        run = pods.flow.enqueue_many(tasks, agent=agent, mode="persistent")
        results = [handle.result(timeout=200) for handle in run.handles]
        verdicts = [result.verdict for result in results]
        assert [verdict and (verdict.reward, verdict.suspect) for verdict in verdicts] == [(reward, "")] * 3, [r.failure for r in results]
        for result in results:
            assert result.attempt is not None
            assert result.attempt.environment["kind"] == "kubernetes"
    eventually(lambda: not cluster.objects("pods"), "every pod to be gone")
    lines = pods.rows("SELECT kind, destroyed_at IS NULL AS stands FROM created_resources")
    assert {(line.kind, line.stands) for line in lines} == {("pod", False)}
